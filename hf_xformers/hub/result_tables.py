# SPDX-License-Identifier: Apache-2.0
"""How rows of benchmark results are shown: results first, in few columns, and what is bookkeeping folded away."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 7  # columns of a table; more do not fit a page
FILE = Path(__file__).with_name("results.toml")
Row = dict[str, Any]


@dataclass(frozen=True)
class ResultTable:
    """title, caption: of the table, where it is not on a page of its own. columns: those that are shown, in order."""

    title: str = ""
    caption: str = ""
    columns: tuple[str, ...] = ()


@functools.cache
def result_tables() -> dict[str, ResultTable]:
    """By file, or "file/part"."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: ResultTable(**{**entry, "columns": tuple(entry["columns"])}) for name, entry in content.items()}


def parted(rows: Sequence[Row], name: str, drop: Container[str] = ()) -> tuple[list[Row], list[Row]]:
    """Rows with the columns that are shown of the table `name`, and with the others, which begin with what tells the
    rows apart; these are empty where all are shown. Columns without any value are left out, as are those in `drop`."""
    given = dict.fromkeys(
        key for row in rows for key, value in row.items() if value not in (None, "") and key not in drop
    )
    known = result_tables().get(name, ResultTable()).columns
    shown = [key for key in known if key in given] or list(given)
    shown = shown[:MOST]
    others = [key for key in given if key not in shown]
    first = next((n for n, key in enumerate(shown) if any(isinstance(row.get(key), float) for row in rows)), 1)
    return _with(rows, shown), _with(rows, [*shown[: max(first, 1)], *others]) if others else []


def _with(rows: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    return [{key: row.get(key) for key in columns} for row in rows]
