# SPDX-License-Identifier: Apache-2.0
"""Bounds of single fields, declared where the field is: what a spec's number may be, whatever the other fields are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bounds:
    """
    Args:
        least, most: the smallest and the largest number.
        above, below: those that are just too small and too large.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether a number is inside; NaN never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def demand(self, field: str) -> str:
        low = f"`{field}` >= {self.least}" if self.above is None else f"`{field}` > {self.above}"
        high = f"`{field}` <= {self.most}" if self.below is None else f"`{field}` < {self.below}"
        if self.most is None and self.below is None:
            return low
        if self.least is None and self.above is None:
            return high
        opening = f"[{self.least}" if self.above is None else f"({self.above}"
        return f"`{field}` in {opening}, " + (f"{self.most}]" if self.below is None else f"{self.below})")


def bounded(
    default: Any,
    *aliases: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A spec's field with a default, bounds ([`Bounds`]) and further names, as [`aliased`] gives them.

    The bounds hold for a number and for each number of a tuple at any depth, which must not be empty then; None and
    words pass.
    """
    metadata = {"aliases": aliases, "bounds": Bounds(least, above, most, below)}
    return dataclasses.field(default=default, metadata=metadata)


def factor_or_flag(spec: Any, field: str) -> bool | float:
    """A field that is a flag or, in its place, a factor; the factor 1 is no factor, and equals True in Python.

    Raises:
        ValueError: the factor is not positive.
    """
    value = getattr(spec, field)
    if isinstance(value, bool):
        return value
    if not value > 0:
        raise ValueError(f"{spec.type} needs `{field}` > 0, or True or False, got {value}.")
    return False if value == 1 else value


@functools.cache
def field_bounds(spec_class: type) -> dict[str, Bounds]:
    """Field -> its bounds. They hold for a class that declares the field anew, with another default, as well; the base
    that has them need not be a dataclass."""
    found = {}
    for base in reversed(spec_class.__mro__):
        for name, field in {**vars(base), **vars(base).get("__dataclass_fields__", {})}.items():
            if isinstance(field, dataclasses.Field) and "bounds" in field.metadata:
                found[name] = field.metadata["bounds"]
    return found


def check_bounds(spec: Any) -> None:
    """Raises `ValueError` for the first field that is out of its bounds."""
    spec_class: Any = type(spec)
    for name, bounds in field_bounds(spec_class).items():
        value = getattr(spec, name)
        if value == () or not all(map(bounds.hold, _numbers(value))):
            raise ValueError(f"{spec.type} needs {bounds.demand(name)}, got {value}.")


def check_layers(spec: Any, config: Any, field: str = "layers") -> None:
    """Raises `ValueError` where a field names a layer that the tower does not have; None and words pass."""
    named, count = getattr(spec, field), config.num_hidden_layers
    if isinstance(named, tuple) and not all(0 <= layer < count for layer in named):
        raise ValueError(f"{spec.type} needs `{field}` from 0 to {count - 1}, those of the tower, got {named}.")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for entry in value:
            yield from _numbers(entry)
    elif isinstance(value, int | float):
        yield value
