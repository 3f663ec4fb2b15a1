# SPDX-License-Identifier: Apache-2.0
"""Where a row comes from: its file and line, kept next to the columns so that a message about a row can name both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

ORIGIN = "__origin__"  # a column of text such as "'train.csv', line 7"; rows of the Hub have none


def with_origins(rows: Dataset, origins: Sequence[str]) -> Dataset:
    """The rows with their places next to them; without, where the places are of other rows."""
    return rows.add_column(ORIGIN, list(origins)) if len(origins) == len(rows) else rows


def columns_of(rows: Dataset) -> list[str]:
    """The columns of the data itself."""
    return [name for name in rows.column_names if name != ORIGIN]


class RowNames:
    """How messages call the rows of a split: by file and line where they are known, and by the number in the split."""

    def __init__(self, rows: Dataset, split: str) -> None:
        self._places = rows[ORIGIN] if ORIGIN in rows.column_names else None
        self._split = split

    def __getitem__(self, row: int) -> str:
        number = f"row {row} of the {self._split} split"
        return number if self._places is None else f"{self._places[row]}: {number}"
