"""The configuration of a model whose components are swapped: what was there, with the changes on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.changes import merge_changes
from ..core.components import SLOTS, Spec, did_you_mean

# What may change beside components: the weights that this touches can be derived.
_FIELDS = ("max_length", "num_key_value_heads", "decoder", "per_layer_config")
# Not `head`: in every conversion that is the class to make.
SWAPPABLE = tuple(slot for slot in SLOTS if slot != "head")
_NOT_OURS = ("model_type", "transformers_version", "architectures", "dtype")


def swapped_config(config: XFormerConfig, changes: Mapping[str, Any]) -> XFormerConfig:
    """`config` with `changes`: components by slot, `max_length`, `num_key_value_heads`, `decoder`, `per_layer_config`.

    Overrides of single layers and of the decoder that `config` has stay where `changes` does not name them.

    Raises:
        ValueError: nothing changes, a field that cannot change, or what the configuration itself refuses.
    """
    for name in changes:
        _check_name(name, config)
    if not changes:
        raise ValueError(f"Nothing to swap; give a component ({', '.join(SWAPPABLE)}) or one of {', '.join(_FIELDS)}.")
    length = changes.get("max_length")
    if length is not None and length < 1:
        raise ValueError(f"`max_length` must be at least 1 token, got {length}.")
    if changes.get("decoder") is not None and not config.is_encoder_decoder:
        raise ValueError("`decoder` changes the second tower, which this model does not have; leave it out.")
    left_out = [name for name in ("max_length", "decoder", "per_layer_config") if changes.get(name) is None]
    given = {name: value for name, value in changes.items() if name not in (*left_out, "max_length")}
    if length is not None:
        given["max_position_embeddings"] = length
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_OURS}
    fields |= merge_changes(fields, given, take_over=shared_settings)
    swapped = type(config)(**fields)
    if _types(swapped) != _types(config):
        swapped = XFormerConfig(**fields)
    swapped._attn_implementation_internal = config._attn_implementation
    return swapped


def _check_name(name: str, config: XFormerConfig) -> None:
    if name in SWAPPABLE or name in _FIELDS:
        return
    if name == "max_position_embeddings":
        raise ValueError("Give the length that positions shall cover as `max_length`, not `max_position_embeddings`.")
    if name in {field.name for field in dataclasses.fields(config)}:
        raise ValueError(
            f"`{name}` cannot change in a swap: the weights would not keep their meaning. What can: components "
            f"({', '.join(SWAPPABLE)}), {', '.join(_FIELDS)}."
        )
    known = (*SWAPPABLE, *_FIELDS)
    raise ValueError(
        f"There is nothing called {name!r} to swap.{did_you_mean(name, known)} Give one of {', '.join(known)}."
    )


def shared_settings(before: Spec, spec_class: type[Spec]) -> dict[str, Any]:
    """What a component of `spec_class` takes over from the one in whose place it is put: the fields of their nearest
    common class, and biases and activation of any feed-forward network."""
    shared = next(base for base in type(before).__mro__ if issubclass(spec_class, base))
    kept = {field.name: getattr(before, field.name) for field in dataclasses.fields(shared)}
    own = {field.name for field in dataclasses.fields(spec_class)}
    for name, settled in (
        ("bias", "bias"),
        ("activation", "activation_name"),
    ):  # the same in all feed-forward networks
        if before.slot == "feedforward" and name in own and hasattr(before, settled):
            kept[name] = getattr(before, settled)
    return kept


def _types(config: XFormerConfig) -> list[list[str]]:
    return [
        [getattr(layer, slot).type for slot in SLOTS]
        for view in config.tower_configs()
        for layer in view.layer_configs()
    ]


def changed_slots(before: XFormerConfig, after: XFormerConfig) -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations, in plain values: (before, after) by field."""
    old, new = before.to_dict(), after.to_dict()
    names = [*SLOTS, "max_position_embeddings", "num_key_value_heads", "decoder", "per_layer_config"]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


__all__ = ["SWAPPABLE", "changed_slots", "shared_settings", "swapped_config"]
