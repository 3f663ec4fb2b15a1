# SPDX-License-Identifier: Apache-2.0
"""Typed specs and their registries: what components and objectives, or whatever else is looked up by name, share.

A *spec* is a small dataclass whose fields are checked against their types. It stands in the same file as what it
configures and is registered there under a name; the file is in a registry package (a "room" in identifiers). It is
imported the first time one of its names is looked up, so a file that is dropped into it is found without a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, TypeVar

from huggingface_hub.dataclasses import strict, type_validator
from huggingface_hub.errors import StrictDataclassError

from .bounds import check_bounds
from .discovery import PLUGINS, import_plugins, import_room


class TypedSpec:
    """Base of all specs. Subclasses are made dataclasses when they are registered ([`register_in`])."""

    type: ClassVar[str] = ""
    registry: ClassVar[Registry[Any] | None] = None

    def to_dict(self) -> dict[str, Any]:
        """`{"type": name, **fields}`: what JSON files store and what [`build_in`] accepts."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = [entry.to_dict() if isinstance(entry, TypedSpec) else entry for entry in value]
            fields[field.name] = value.to_dict() if isinstance(value, TypedSpec) else value
        return {"type": self.type, **fields}

    def check_fields(self) -> None:
        """Checks of this spec alone beyond the bounds of its fields ([`bounded`]); raises `ValueError` with the
        offending value and the remedy."""

    def check_values(self) -> None:
        """Raises `ValueError` for values that this spec cannot have, whatever the others are."""
        check_bounds(self)
        self.check_fields()


AnySpec = TypeVar("AnySpec", bound=TypedSpec)
_lookups: ContextVar[set[type[TypedSpec]] | None] = ContextVar("lookups", default=None)


class Registry(Generic[AnySpec]):
    """Names and the spec classes that are registered under them.

    name: what the specs are for; room: the folder whose files register them; kind: the noun in error messages.
    """

    def __init__(self, name: str, room: str, kind: str | None = None):
        self.name = name
        self.room = room
        self.kind = kind or name
        self._specs: dict[str, type[AnySpec]] = {}
        self._aliases: dict[str, str] = {}
        self._complete = False

    def add(self, spec_class: type[AnySpec], name: str, aliases: tuple[str, ...] = ()) -> None:
        """Raises `ValueError` for a name or alias that another class has: of another module, or of another name."""
        for taken in (name, *aliases):
            if not spec_class.__module__.startswith(f"{__name__.partition('.')[0]}."):
                self._import_room(taken)  # which has a component of that name to read yet, perhaps
            known = self._specs.get(self._aliases.get(taken, taken))
            if known is not None and (known.__module__, known.__qualname__) != (
                spec_class.__module__,
                spec_class.__qualname__,
            ):
                raise ValueError(
                    f"The {self.kind} {taken!r} is already registered by {known.__module__}; choose another name in"
                    f" {spec_class.__module__}."
                )
        self._specs[name] = spec_class
        for alias in aliases:
            self._aliases[alias] = name

    def holds(self, spec: TypedSpec) -> bool:
        """Whether a spec is one of these."""
        return spec.registry is self

    def _import_room(self, module: str | None = None) -> None:
        import_room(self.room, module)
        if module is None:
            self._complete = True

    def find(self, name: str) -> type[AnySpec] | None:
        """The spec class registered as `name`, or under it as an alias; None where there is none."""
        for step in ("known", "module", "room", "plugins"):
            if step == "module":  # most specs stand in a file of their own name
                self._import_room(name)
            elif step == "room" and not self._complete:
                self._import_room()
            elif step == "plugins":
                import_plugins()
            found = self._specs.get(self._aliases.get(name, name))
            if found is not None:
                seen = _lookups.get()
                if seen is not None:
                    seen.add(found)
                return found
        return None

    def get(self, name: str) -> type[AnySpec]:
        """The spec class registered as `name`. Raises `ValueError` that lists the names for an unknown one."""
        found = self.find(name)
        if found is None:
            known = [*self, *self._aliases]
            raise ValueError(
                f"Unknown {self.kind} {name!r}.{did_you_mean(name, known)} Known names: {', '.join(self)}."
                " One of your own has to be imported first: by `import MODULE`, `hf-xformers COMMAND --import MODULE`,"
                f" or the entry-point group {PLUGINS} of your package. A self-contained checkpoint brings it along,"
                " for processes that do not import hf_xformers."
            )
        return found

    def __iter__(self) -> Iterator[str]:
        if not self._complete:
            self._import_room()
        import_plugins()
        return iter(sorted(self._specs))


class Catalog(Mapping[str, type[AnySpec]]):
    """A registry as a mapping, name to spec class, which imports the package when it is read."""

    def __init__(self, registry: Registry[AnySpec]):
        self._registry = registry

    def __getitem__(self, name: str) -> type[AnySpec]:
        found = self._registry.find(name) if isinstance(name, str) else None
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(list(self._registry))


@contextlib.contextmanager
def record_lookups() -> Iterator[set[type[TypedSpec]]]:
    """Collects the spec classes that are looked up while the block runs, e.g. while a config is built."""
    found: set[type[TypedSpec]] = set()
    token = _lookups.set(found)
    try:
        yield found
    finally:
        _lookups.reset(token)


# ------------------------------------------------------------------------------------------------ fields


def resolve_field_types(cls: type) -> None:
    """Turns the types of a dataclass's fields, which postponed evaluation left as text, into types: `strict` checks no
    field whose type is text. The fields that transformers itself declares stay as they are."""
    for field in dataclasses.fields(cls):
        owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
        if isinstance(field.type, str) and not owner.__module__.startswith("transformers."):
            field.type = eval(field.type, vars(sys.modules[owner.__module__]))


def aliased(default: Any, *names: str) -> Any:
    """A spec's field with a default and further names that users may give it by: the short word that related
    components share, such as `window`. What is stored and shown is the field's own name."""
    return dataclasses.field(default=default, metadata={"aliases": names})


def field_aliases(spec_class: type) -> dict[str, str]:
    """Alias -> field, for the fields of a spec that have further names ([`aliased`])."""
    return {
        alias: field.name for field in dataclasses.fields(spec_class) for alias in field.metadata.get("aliases", ())
    }


def canonical_fields(spec_class: type[TypedSpec], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` under the spec's own names; names that it does not know stay.

    Raises:
        ValueError: a field is given twice, by its name and by an alias.
    """
    aliases = field_aliases(spec_class)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        own = aliases.get(name, name)
        if own in found:
            place = spec_class.registry.name if spec_class.registry else "spec"
            raise ValueError(f"{own!r} of {place} {spec_class.type!r} is given twice, also as an alias; give one.")
        found[own] = value
    return found


def default_of(cls: type, name: str) -> Any:
    """The default of a dataclass's field; None where it has to be given."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ " Did you mean 'x'?" for the known name next to `name`; nothing where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


# ------------------------------------------------------------------------------------------------ making specs


def register_in(
    registry: Registry[AnySpec],
    cls: type[AnySpec],
    name: str,
    aliases: tuple[str, ...] = (),
    frozen: bool = False,
) -> type[AnySpec]:
    """Makes `cls` a dataclass with checked fields and registers it as `name`.

    frozen: its objects cannot be changed, and call [`check_types`] themselves when they are made (`strict` checks
    assignments, of which a frozen dataclass knows none).
    """
    cls = dataclasses.dataclass(kw_only=True, frozen=frozen)(cls)
    resolve_field_types(cls)
    if not frozen:
        cls = strict(cls)
    clash = {field.name for field in dataclasses.fields(cls)} & set(field_aliases(cls))  # type: ignore[arg-type]
    if clash:
        raise ValueError(f"The {registry.kind} {name!r} has {min(clash)!r} both as a field and as an alias.")
    registry.add(cls, name, aliases)
    cls.type, cls.registry = name, registry
    return cls


def check_types(spec: TypedSpec) -> None:
    """Raises `TypeError` for a field whose value is not of the type that the registered class declares."""
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        try:
            type_validator(field.name, getattr(spec, field.name), field.type)
        except TypeError as error:
            raise TypeError(f"Wrong value for {type(spec).__name__}: {error}") from None


def build_in(registry: Registry[AnySpec], value: Any, asked: str) -> AnySpec:
    """The spec that `value` (a name, a dict with `type`, or a spec) stands for. asked: the name of the
    argument, for error messages.

    Raises:
        TypeError: `value` or one of its fields has a wrong type.
        ValueError: unknown name or field (the message lists the valid ones), or a value out of range.
    """
    if isinstance(value, TypedSpec):
        if not registry.holds(value):
            kind = value.registry.kind if value.registry else "unregistered"
            raise TypeError(f"`{asked}` was given the {kind} {value.type!r}.")
        value.check_values()
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        raise TypeError(f"`{asked}` must be a name, a dict or a spec, got {type(value).__name__}: {value!r}.")
    fields = dict(value)
    name = fields.pop("type", None)
    if not isinstance(name, str):
        raise ValueError(f"`{asked}` needs a string under 'type' (one of {', '.join(registry)}), got {value!r}.")
    spec_class = registry.get(name)
    fields = canonical_fields(spec_class, fields)
    valid = {field.name: field.name for field in dataclasses.fields(spec_class)}  # type: ignore[arg-type]
    unknown = [key for key in fields if key not in valid]
    if unknown:
        aliases = field_aliases(spec_class)
        for alias, field_name in aliases.items():
            valid[field_name] += f" (or {alias})"
        raise ValueError(
            f"Unknown field {unknown[0]!r} of {asked} {name!r}.{did_you_mean(unknown[0], [*valid, *aliases])} Its"
            f" fields are: {', '.join(valid.values()) or 'none'}."
        )
    for field in dataclasses.fields(spec_class):  # type: ignore[arg-type]
        given = field.name in fields or field.default_factory is not dataclasses.MISSING
        if not given and field.default is dataclasses.MISSING:
            raise ValueError(f"{asked} {name!r} needs `{field.name}`, which has no default; give it.")
    for key, entry in fields.items():
        if isinstance(entry, list):  # JSON has no tuples; frozen sequences keep specs comparable and hashable by value
            fields[key] = tuple(tuple(item) if isinstance(item, list) else item for item in entry)
    try:
        spec = spec_class(**fields)
    except StrictDataclassError as error:
        detail = str(error).splitlines()[-1].strip()
        raise TypeError(f"Wrong value for {asked} {name!r}: {detail.removeprefix('TypeError: ')}") from None
    spec.check_values()
    return spec
