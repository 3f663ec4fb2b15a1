# SPDX-License-Identifier: Apache-2.0
"""The account of a swap: what became of every tensor, and how far the outputs moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .movement import Movement
from .report import Report, tensors


@dataclass
class SwapReport:
    """What a swap did, by tensor name of this package's models.

    Args:
        source, target: class names, both ours.
        changes: (before, after) by configuration field.
        kept: the same tensors.
        derived: (tensors of the source, tensor of the target, how); without sources where a neutral value keeps the
            function.
        new: started as the component's paper says.
        dropped: tensors of the source that nothing was made of.
        movement: how far the outputs moved before any training.
        conversion: how a model of transformers became one of ours first.
        notes: what else to know.
    """

    source: str
    target: str
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    derived: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    movement: Movement | None = None
    conversion: Report | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """A few lines for people: counts, what was derived and how, names of what is new or dropped, the movement."""
        lines = [
            f"{self.source} -> {self.target}: {tensors(len(self.kept))} kept, {len(self.derived)} derived,"
            f" {len(self.new)} new, {len(self.dropped)} dropped"
        ]
        for name, (before, after) in self.changes.items():
            lines.append(f"  {name}: {_short(before)} -> {_short(after)}")
        ways = Counter((_last(name), how) for _, name, how in self.derived)
        lines.extend(f"  derived: {name} ({how}), {tensors(count)}" for (name, how), count in ways.items())
        for title, names in (("new", self.new), ("dropped", self.dropped)):
            kinds = Counter(map(_last, names))
            lines.extend(f"  {title}: {name}, {tensors(count)}" for name, count in kinds.items())
        if self.movement is not None:
            lines.append(f"  outputs: {self.movement}")
        if self.conversion is not None:
            lines.extend(f"  converted first: {line.strip()}" for line in self.conversion.summary().splitlines())
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


def _last(name: str) -> str:
    """A tensor's name without the part that counts layers."""
    parts = name.split(".")
    places = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[places[0] + 1 :]) if places else name


def _short(value: Any) -> str:
    if isinstance(value, dict) and "type" in value:
        return str(value["type"])
    return str(value)
