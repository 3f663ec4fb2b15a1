# SPDX-License-Identifier: Apache-2.0
"""The configuration of a model whose components are swapped: what was there, with the changes on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.changes import changed_component, class_of_change, merge_changes
from ..core.components import SLOTS, Spec, did_you_mean
from ..variants import config_class

# What may change besides components: the weights that this touches can be derived.
_FIELDS = ("max_length", "num_key_value_heads", "decoder", "per_layer_config")
# Not `head`: in every conversion that is the class to make.
SWAPPABLE = tuple(slot for slot in SLOTS if slot != "head")
# What single layers may have of their own.
LAYERED = ("attention", "cross_attention", "feedforward", "normalization")
Layers = str | Iterable[int]
_NOT_OURS = ("model_type", "transformers_version", "architectures", "dtype")


def swapped_config(
    config: XFormerConfig,
    changes: Mapping[str, Any],
    layers: Mapping[str, Layers] | None = None,
    head: str = "Model",
) -> XFormerConfig:
    """`config` with `changes`: components by slot, `max_length`, `num_key_value_heads`, `decoder`, `per_layer_config`.

    layers: by slot, the layers that its change is for, as numbers from 0 on, as text (`"0-9,12"`), or `"all"`; the
    others stay as they are. Overrides of single layers and of the decoder that `config` has stay where `changes` does
    not name them. head: of the model. With components of other types the result is the free mix, but of images and
    sound, and under a head that the free mix does not have, the variant.

    Raises:
        ValueError: nothing changes, a field that cannot change, layers that do not exist or have a component of their
            own which nothing is said of, or what the configuration itself refuses.
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
    given = _in_layers(config, given, layers or {})
    if length is not None:
        given["max_position_embeddings"] = length
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_OURS}
    fields |= merge_changes(fields, given, take_over=shared_settings)
    if length is not None and length != config.max_position_embeddings and "position" not in changes:
        fields["position"] = _same_reach(fields["position"], config.max_position_embeddings)
    swapped = type(config)(**fields)
    if _types(swapped) != _types(config) and config.modality == "text":
        mix = config_class(XFormerConfig.model_type)  # with its heads, which are known when its family is imported
        swapped = mix(**fields) if head in mix.heads else swapped
    decoder = changes.get("decoder")
    if "position" not in changes and "position" not in (decoder if isinstance(decoder, Mapping) else {}):
        _check_order(config, swapped)
    swapped._attn_implementation = config._attn_implementation
    return swapped


def _same_reach(position: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A position whose distances, where they end with the longest text, end where they did."""
    parts = {"parts": [_same_reach(part, length) for part in position["parts"]]} if "parts" in position else {}
    return {**position, **parts, **({"max_distance": length} if position.get("max_distance", 0) is None else {})}


def _in_layers(config: XFormerConfig, changes: dict[str, Any], layers: Mapping[str, Layers]) -> dict[str, Any]:
    """`changes` with those that are for single layers as their `per_layer_config`, complete."""
    fields = config.to_dict()
    own = {int(number): dict(entry) for number, entry in (fields.get("per_layer_config") or {}).items()}
    chosen = {slot: layer_numbers(slot, which, config.num_hidden_layers) for slot, which in layers.items()}
    for slot in chosen:
        if slot not in changes:
            raise ValueError(f"Layers are chosen for {slot!r}, which does not change; say what it becomes.")
    if chosen and "per_layer_config" in changes:
        raise ValueError("`per_layer_config` says itself what single layers have; leave the choice of layers out.")
    for slot in (slot for slot in LAYERED if slot in changes and "per_layer_config" not in changes):
        differing = sorted(number for number, entry in own.items() if slot in entry)
        if slot in chosen or not differing:
            continue
        if class_of_change(slot, changes[slot], fields[slot]).type != fields[slot]["type"]:
            raise ValueError(
                f"Layers with a {slot!r} of their own: {', '.join(map(str, differing))}; say which layers"
                " change (`layers`: 'all', or '0-9,12')."
            )
    moved = {slot: changes[slot] for slot in chosen}
    for slot, numbers in chosen.items():
        made = {
            number: changed_component(
                slot, moved[slot], own.get(number, {}).get(slot, fields[slot]), take_over=shared_settings
            )
            for number in numbers
        }
        if len(numbers) == config.num_hidden_layers and all(entry == made[0] for entry in made.values()):
            changes = {**changes, slot: made[0]}
            own = {number: {key: entry[key] for key in entry if key != slot} for number, entry in own.items()}
            continue
        changes = {key: value for key, value in changes.items() if key != slot}
        for number, component in made.items():
            own.setdefault(number, {})[slot] = component
    return {**changes, "per_layer_config": {n: own[n] for n in sorted(own) if own[n]} or None} if chosen else changes


def layer_numbers(slot: str, which: Layers, count: int) -> list[int]:
    """The layers that `which` means, of `count`.

    Raises:
        ValueError: not numbers and ranges from 0 on, a layer that does not exist, or a slot that is alike in all.
    """
    if slot not in LAYERED:
        raise ValueError(f"All layers have one {slot!r}; single layers can have these: {', '.join(LAYERED)}.")
    numbers: set[int] = set()
    for part in str(which).split(",") if isinstance(which, (str, int)) else which:
        first, dash, last = str(part).strip().partition("-")
        if str(part).strip() == "all":
            numbers.update(range(count))
        elif first.isdecimal() and (last.isdecimal() if dash else not last) and int(first) <= int(last or first):
            numbers.update(range(int(first), int(last or first) + 1))
        else:
            raise ValueError(f"Layers are numbers and ranges such as '0-9,12', or 'all', got {which!r}.")
    if not numbers or max(numbers) >= count:
        raise ValueError(f"Layers {which!r} do not exist: the model has {count}, numbered from 0 on.")
    return sorted(numbers)


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
    common class, and what means the same in all components of the slot."""
    shared = next(base for base in type(before).__mro__ if issubclass(spec_class, base))
    kept = {field.name: getattr(before, field.name) for field in dataclasses.fields(shared)}
    own = {field.name for field in dataclasses.fields(spec_class)}
    kept |= {name: value for name, value in before.common_settings().items() if name in own}
    if isinstance(before, spec_class):
        return kept
    return {name: value for name, value in kept.items() if name not in spec_class.not_taken_over}


def settings_left_behind(before: XFormerConfig, after: XFormerConfig) -> list[str]:
    """What components of the one had set and those of the other in their place do not take over, in words."""
    notes = []
    for old, new in _layers_of_both(before, after):
        for slot in SLOTS:
            first, second = getattr(old, slot), getattr(new, slot)
            for name in second.not_taken_over if first.type != second.type else ():
                value = getattr(first, name) if name in {field.name for field in dataclasses.fields(first)} else None
                if value is not None and value != getattr(second, name):
                    notes.append(f"{slot} {second.type!r} does not take over {name}={value!r}")
    return list(dict.fromkeys(notes))


def _layers_of_both(before: XFormerConfig, after: XFormerConfig) -> list[tuple[XFormerConfig, XFormerConfig]]:
    return [
        (old.layer(index), new.layer(index))
        for old, new in zip(before.tower_configs(), after.tower_configs(), strict=True)
        for index in range(old.num_hidden_layers)
    ]


def _check_order(before: XFormerConfig, after: XFormerConfig) -> None:
    """Refuses to take the order of tokens from a model that knows it by its attention alone."""
    for old, new in zip(before.tower_configs(), after.tower_configs(), strict=True):
        knew = next((layer.attention for layer in old.layer_configs() if layer.attention.knows_order), None)
        if knew is None or new.position.acts or any(layer.attention.knows_order for layer in new.layer_configs()):
            continue
        raise ValueError(
            f"attention {knew.type!r} is all that tells this model the order of tokens, which"
            f" {new.layer_configs()[0].attention.type!r} does not know; give a position in the same swap, such as"
            " 'rotary' (or 'none', if order shall not count), or leave some layers as they are (`layers`)."
        )


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
