"""The configuration of a model whose components are swapped: what was there, with the changes on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SLOTS, Spec, build_spec, canonical_fields, did_you_mean

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
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_OURS}
    for slot, given in changes.items():
        if slot in SWAPPABLE:
            fields[slot] = carried(slot, given, fields[slot])
    length = changes.get("max_length")
    if length is not None:
        if length < 1:
            raise ValueError(f"`max_length` must be at least 1 token, got {length}.")
        fields["max_position_embeddings"] = length
    if "num_key_value_heads" in changes:
        fields["num_key_value_heads"] = changes["num_key_value_heads"]
    if changes.get("decoder") is not None:
        if not config.is_encoder_decoder:
            raise ValueError("`decoder` changes the second tower, which this model does not have; leave it out.")
        own = fields.get("decoder") or {}
        fields["decoder"] = {**own, **_layer(changes["decoder"], {**fields, **own})}
    if changes.get("per_layer_config") is not None:
        layers = changes["per_layer_config"]
        fields["per_layer_config"] = {layer: _layer(entry, fields) for layer, entry in layers.items()}
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


def _layer(overrides: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a tower or a layer whose components keep what they share with those below."""
    return {name: carried(name, value, fields[name]) if name in SLOTS else value for name, value in overrides.items()}


def carried(slot: str, given: Any, old: Any) -> dict[str, Any]:
    """The component `given` for `slot` as a dict, with the settings that it shares with `old`: the fields of their
    nearest common class, and biases and activation of any feed-forward network. A dict without `type` changes `old`
    itself.

    Raises:
        ValueError, TypeError: as [`build_spec`].
    """
    if isinstance(given, Spec):
        return build_spec(slot, given).to_dict()
    before = build_spec(slot, old)
    if not isinstance(given, (str, Mapping)):
        raise TypeError(f"`{slot}` must be a name, a dict or a spec, got {type(given).__name__}: {given!r}.")
    fields = {"type": given} if isinstance(given, str) else {"type": before.type, **given}
    spec_class = SLOTS[slot].get(fields["type"])
    shared = next(base for base in type(before).__mro__ if issubclass(spec_class, base))
    kept = {field.name: getattr(before, field.name) for field in dataclasses.fields(shared)}
    own = {field.name for field in dataclasses.fields(spec_class)}
    for name, settled in (
        ("bias", "bias"),
        ("activation", "activation_name"),
    ):  # the same in all feed-forward networks
        if slot == "feedforward" and name in own and hasattr(before, settled):
            kept[name] = getattr(before, settled)
    return build_spec(slot, {**kept, **canonical_fields(spec_class, fields)}).to_dict()


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


__all__ = ["SWAPPABLE", "carried", "changed_slots", "swapped_config"]
