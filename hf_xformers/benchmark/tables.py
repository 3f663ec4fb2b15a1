# SPDX-License-Identifier: Apache-2.0
"""Results as files: JSON for programs, a Markdown table for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.saved_files import write_text


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table; numbers with two decimals, or one digit that counts where these would be zeros, absent cells
    empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column) for column in columns)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def about(machine: Mapping[str, Any], dtype: str = "float32 unless said") -> str:
    """A sentence about where something was measured."""
    return (
        f"Measured on {machine['device']}, {machine['threads']} thread(s), {dtype}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}."
    )


def write_json(path: Path, content: Any) -> None:
    """Results as they are stored: a killed run leaves the old file or the new one."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_results(
    folder: Path,
    name: str,
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    title: str,
    note: str,
) -> Path:
    """Writes `<name>.json` and `<name>.md` to `folder`; returns the path of the latter."""
    write_json(folder / f"{name}.json", {"machine": machine, "rows": rows})
    text = f"# {title}\n\n{note}\n\n{about(machine)}\n\n{table(rows, columns)}\n"
    write_text(folder / f"{name}.md", text)
    return folder / f"{name}.md"
