# SPDX-License-Identifier: Apache-2.0
"""Settings of the heads that only pretraining has: one typed spec for each such head.

A *pretraining spec* is a small frozen dataclass that stands in the file of the head that reads it and is registered
there under the file's name. A config holds those that its variant has decided, and those that differ from the defaults
([`settled_pretraining`]); a head reads its own by [`PretrainingSpec.of`]. Specs do not change, so that configs which
hold the same one cannot change one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

from .specs import Registry, TypedSpec, aliased, build_in, check_types, register_in

AnyPretraining = TypeVar("AnyPretraining", bound="PretrainingSpec")


@dataclass(frozen=True, kw_only=True)
class PretrainingSpec(TypedSpec):
    """Base of the settings of pretraining heads.

    A subclass declares typed fields with the paper's defaults and is registered with [`register_pretraining`].
    `check_fields` refuses values; what concerns the rest of a config, the head refuses. summary: what is trained with
    them, in one line.
    """

    summary: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_values()

    @classmethod
    def of(cls, config: Any) -> Self:
        """The settings of this kind that a config has; the defaults where it says nothing.

        Raises:
            TypeError: an entry of `config.pretraining` was put there by hand, past the config's checks.
        """
        found = config.pretraining.get(cls.type)
        if found is None:
            return cls()
        if not isinstance(found, cls):
            raise TypeError(
                f"`pretraining[{cls.type!r}]` must be a {cls.__name__}, got {type(found).__name__}: {found!r}; assign"
                f" the whole mapping, `config.pretraining = {{{cls.type!r}: ...}}`, which checks it."
            )
        return found

    def plain(self) -> dict[str, Any]:
        """The fields alone, as configs store them under the spec's name."""
        fields = self.to_dict()
        del fields["type"]
        return fields


PRETRAINING: Registry[PretrainingSpec] = Registry("pretraining", room="modeling", kind="pretraining spec")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(aliased,))
def register_pretraining(name: str) -> Callable[[type[AnyPretraining]], type[AnyPretraining]]:
    """Class decorator: makes `cls` a frozen dataclass with checked fields and registers it as `name`."""

    def enter(cls: type[AnyPretraining]) -> type[AnyPretraining]:
        return cast(type[AnyPretraining], register_in(PRETRAINING, cls, name, frozen=True))

    return enter


def changed_pretraining(before: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> dict[str, PretrainingSpec]:
    """The settings `before` with `changes` on top, both by the name of the spec: an entry is a dict of fields, which
    changes these alone, or a spec, which stands for itself.

    Raises:
        TypeError: no mapping, an entry that is none and no spec, the spec of another name, or a value of a wrong type.
        ValueError: unknown name or field (the message lists the valid ones), or a value out of range.
    """
    specs: dict[str, PretrainingSpec] = {}
    for given in (before or {}, changes):
        if not isinstance(given, Mapping):
            raise TypeError(
                "`pretraining` must be a dict of the settings of pretraining heads, such as {'span_boundary':"
                f" {{'weight': 0.5}}}}, got {type(given).__name__}: {given!r}."
            )
        for name, entry in given.items():
            specs[name] = _changed(name, specs.get(name), entry)
    return specs


def _changed(name: str, before: PretrainingSpec | None, entry: Any) -> PretrainingSpec:
    spec_class = PRETRAINING.get(name)
    place = f"pretraining[{name!r}]"
    if isinstance(entry, PretrainingSpec):
        if not isinstance(entry, spec_class):
            raise TypeError(f"`{place}` was given the settings of {entry.type!r}; give them under that name.")
        return entry
    if not isinstance(entry, Mapping):
        raise TypeError(f"`{place}` must be a dict of fields or a spec, got {type(entry).__name__}: {entry!r}.")
    if entry.get("type", name) != name:
        raise ValueError(f"`{place}` has 'type' {entry['type']!r}; leave it out, for the key is the name.")
    return build_in(PRETRAINING, {**(before.plain() if before else {}), **entry, "type": name}, "pretraining")


def settled_pretraining(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, PretrainingSpec]:
    """What a config whose class has decided `own` stores for `given`: the entries of either, without those that nobody
    has decided and that say what the defaults say. Raises as [`changed_pretraining`]."""
    specs = changed_pretraining(own, given)
    return {name: spec for name, spec in specs.items() if name in own or spec != type(spec)()}
