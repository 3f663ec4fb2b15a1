# SPDX-License-Identifier: Apache-2.0
"""Where a converted or swapped model came from: a small file in its folder, which training passes on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.saved_files import read_object, write_json
from .report import Report
from .swap_report import SwapReport

FILE = "conversion.json"


@dataclass(frozen=True)
class Provenance:
    """One step from a source to the model of a folder.

    Args:
        source: folder or Hub id, as it was given.
        classes: before and after.
        variants: this package's model type of the source (what it converts to, where it was transformers') and of the
            result.
        changes: (before, after) by configuration field.
        tensors: how many were kept (or mapped), derived, new and dropped.
        movement: of the outputs, in words.
        earlier: the step before this one, where the source has one.
    """

    source: str
    classes: tuple[str, str]
    variants: tuple[str, str]
    changes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    movement: str | None = None
    earlier: Provenance | None = None

    def steps(self) -> list[Provenance]:
        """This step and those before it, the first of all first."""
        return [*(self.earlier.steps() if self.earlier is not None else []), self]


def write_provenance(folder: Path, source: str | Path, report: Report | SwapReport, variants: tuple[str, str]) -> None:
    """Writes the step that `report` is about, with those before it that the source's folder knows."""
    name = os.fspath(source)
    kept = report.kept if isinstance(report, SwapReport) else report.mapped
    counts = {
        "kept": len(kept),
        "derived": len(report.derived),
        "new": len(report.new),
        "dropped": len(report.dropped),
    }
    first = report.conversion if isinstance(report, SwapReport) and report.conversion is not None else report
    made = Provenance(name, (first.source, report.target), variants, tensors=counts, earlier=read_provenance(name))
    content = asdict(made)
    if isinstance(report, SwapReport):
        content["changes"] = {key: list(values) for key, values in report.changes.items()}
        content["movement"] = None if report.movement is None else str(report.movement)
    write_json(folder / FILE, content)


def read_provenance(folder: str | Path) -> Provenance | None:
    """What a folder says; None for one that says nothing. Raises `ValueError` for a file that is damaged."""
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        return None
    content = read_object(path)
    try:
        return _made(content)
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(f"{str(path)!r} is no account of a conversion; remove it, or copy it again") from None


def _made(content: dict[str, Any]) -> Provenance:
    earlier = content.get("earlier")
    classes, variants = ((str(pair[0]), str(pair[1])) for pair in (content["classes"], content["variants"]))
    return Provenance(
        str(content["source"]),
        classes,
        variants,
        dict(content.get("changes") or {}),
        dict(content.get("tensors") or {}),
        content.get("movement"),
        None if earlier is None else _made(earlier),
    )


def carry_provenance(source: str | None, folder: Path) -> None:
    """Passes on what the folder of a model says to the folder of a training that started from it."""
    place = None if source is None else Path(source).expanduser() / FILE
    if place is not None and place.is_file():
        write_json(folder / FILE, read_object(place))
    else:  # of another model that was here
        (folder / FILE).unlink(missing_ok=True)
