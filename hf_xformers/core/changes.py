# SPDX-License-Identifier: Apache-2.0
"""These changes on top of what is there: components given by name or by some of their fields, merged with the ones
that a config, a preset or a variant's defaults have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .components import SLOTS, Spec, SpecLike, build_spec, canonical_fields
from .pretraining_specs import changed_pretraining
from .specs import default_of

# What a component of another type takes over from the one in whose place it is put: (that one, the new class) ->
# fields.
TakeOver: TypeAlias = Callable[[Spec, type[Spec]], dict[str, Any]]


def components_of(base: Any) -> dict[str, Any]:
    """The component of every slot, the overrides `decoder` and the settings `pretraining`, of a config or of a config
    class (its defaults)."""
    names = (*SLOTS, "decoder", "pretraining")
    if isinstance(base, type):
        return {name: default_of(base, name) for name in names}
    fields = base.to_dict()  # also of a config whose layers differ, whose own attributes are ambiguous
    return {name: fields.get(name) for name in names}


def class_of_change(slot: str, given: SpecLike, before: SpecLike) -> type[Spec]:
    """The spec class that `given` is about: the one it names, else that of the component `before` it changes.

    Raises `ValueError` for an unknown name.
    """
    if isinstance(given, Spec):
        return type(given)
    name = given.get("type") if isinstance(given, Mapping) else given
    return type(build_spec(slot, before)) if name is None else SLOTS[slot].get(name)


def changed_component(
    slot: str, given: SpecLike, before: SpecLike, *, take_over: TakeOver | None = None
) -> dict[str, Any]:
    """The component of `slot` as a dict: `before` with the fields that `given` has, where both are of one type or
    `given` names none; else a new one, with what `take_over` keeps of `before`. A spec stands for itself.

    Raises:
        ValueError: unknown slot, component or field.
        TypeError: a value of the wrong type.
    """
    if slot not in SLOTS:
        raise ValueError(f"unknown slot {slot!r}: the slots are {', '.join(SLOTS)}")
    fields = {"type": given} if isinstance(given, str) else given
    if isinstance(fields, Spec) or not isinstance(fields, Mapping) or not isinstance(fields.get("type", ""), str):
        return build_spec(slot, fields).to_dict()
    old = build_spec(slot, before)
    spec_class = class_of_change(slot, fields, old)
    kept = old.to_dict() if spec_class is type(old) else {}
    if take_over is not None:
        kept |= take_over(old, spec_class)
    return build_spec(slot, {**kept, **canonical_fields(spec_class, fields), "type": spec_class.type}).to_dict()


def merge_changes(
    fields: Mapping[str, Any], changes: Mapping[str, Any], *, take_over: TakeOver | None = None
) -> dict[str, Any]:
    """`changes` to the config fields `fields`, complete: each as the whole value that the field shall have.

    Components are merged with those in `fields` ([`changed_component`]). `decoder` adds to the overrides that are
    there, and its components, like those of single layers (`per_layer_config`), change what the tower has below them.
    Settings of pretraining are merged with those that are there ([`changed_pretraining`]). Other fields stay as they
    are given.

    Raises:
        ValueError, TypeError: as [`changed_component`].
    """
    merged = dict(changes)
    for slot in SLOTS:
        if slot in changes:
            merged[slot] = changed_component(slot, changes[slot], fields[slot], take_over=take_over)
    if "pretraining" in changes:
        merged["pretraining"] = changed_pretraining(fields.get("pretraining"), changes["pretraining"])
    below = {**fields, **merged}
    decoder, layers = changes.get("decoder"), changes.get("per_layer_config")
    if isinstance(decoder, Mapping):
        own = fields.get("decoder") or {}
        merged["decoder"] = {**own, **merge_changes({**below, **own, "decoder": None}, decoder, take_over=take_over)}
    if isinstance(layers, Mapping):
        merged["per_layer_config"] = {
            layer: merge_changes(below, entry, take_over=take_over) if isinstance(entry, Mapping) else entry
            for layer, entry in layers.items()
        }
    return merged
