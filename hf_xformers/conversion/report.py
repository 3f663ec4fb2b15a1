# SPDX-License-Identifier: Apache-2.0
"""What a conversion did with every tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


def tensors(count: int) -> str:
    """A number of tensors in words."""
    return "1 tensor" if count == 1 else f"{count} tensors"


@dataclass
class Report:
    """The account of one conversion, by tensor name.

    Args:
        source, target: class names.
        mapped: (source, target) pairs that hold the same numbers, at most in another layout.
        derived: (source names, target names, how) where tensors were split, merged, shared or filled.
        new: tensors of the target that the source has nothing for, freshly initialized.
        dropped: tensors of the source that the target has no place for.
        notes: settings that could not be carried over and do not change what the model computes in evaluation.
    """

    source: str
    target: str
    mapped: list[tuple[str, str]] = field(default_factory=list)
    derived: list[tuple[tuple[str, ...], tuple[str, ...], str]] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every tensor of both sides has its counterpart."""
        return not self.new and not self.dropped

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """A few lines for people: counts, then what is new, dropped or noted, by name."""
        lines = [
            f"{self.source} -> {self.target}: {tensors(len(self.mapped))} mapped, {len(self.derived)} derived, "
            f"{len(self.new)} new, {len(self.dropped)} dropped"
        ]
        for title, names in (("new", self.new), ("dropped", self.dropped)):
            if names:
                shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                lines.append(f"  {title}: {shown}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)
