# SPDX-License-Identifier: Apache-2.0
"""Results as files: JSON for programs, a Markdown table for people."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.saved_files import write_text
from ..hub.result_tables import parted

DAY = "measured"  # column of the files in JSON


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table; numbers with two decimals or two digits that count, absent cells empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column) for column in columns)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if value == 0 or 0.1 <= abs(value) < 1000:
            return f"{value:.2f}"
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.2g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def folded(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], name: str = "") -> str:
    """A Markdown table of at most seven columns, and below it, folded away, one of the others; empty without rows.

    name: of the table in `hub/results.toml`, which says what comes first; else the first of `columns` do.
    """
    if not rows:
        return ""
    shown, others = parted([{column: row.get(column) for column in columns} for row in rows], name)
    text = table(shown, list(shown[0]))
    if others:
        inside = table(others, list(others[0]))
        text += f"\n\n<details><summary>Settings and further figures</summary>\n\n{inside}\n\n</details>"
    return text


def about(machine: Mapping[str, Any], dtype: str = "float32 unless said") -> str:
    """A sentence about where something was measured."""
    return (
        f"Measured on {machine['device']}, {machine['threads']} thread(s), {dtype}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}."
    )


def write_json(path: Path, content: Any) -> None:
    """Results as they are stored: a killed run leaves the old file or the new one."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_dated(path: Path, content: Mapping[str, Any]) -> None:
    """[`write_json`] of tables, each row with the day on which it was `measured`: today, unless the file has the row
    already."""
    known = _days(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    today = datetime.date.today().isoformat()
    dated = {name: [{**row, DAY: known.get(_key(row), today)} for row in rows] for name, rows in _tables(content)}
    write_json(path, {**content, **dated})


def _tables(content: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for name, rows in content.items():
        if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
            yield name, rows


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps({column: value for column, value in row.items() if column != DAY}, sort_keys=True)


def _days(content: Mapping[str, Any]) -> dict[str, str]:
    return {_key(row): row[DAY] for _, rows in _tables(content) for row in rows if DAY in row}


def write_results(
    folder: Path,
    name: str,
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    title: str,
    note: str,
    further: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `<name>.json`, which has what is `further` as well, and `<name>.md` to `folder`; returns the path of the
    latter."""
    write_dated(folder / f"{name}.json", {"machine": machine, "rows": rows, **(further or {})})
    text = f"# {title}\n\n{note}\n\n{about(machine)}\n\n{folded(rows, columns, name)}\n"
    write_text(folder / f"{name}.md", text)
    return folder / f"{name}.md"
