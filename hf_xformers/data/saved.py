# SPDX-License-Identifier: Apache-2.0
"""Folders that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote: they hold Arrow files, with JSON about them
besides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .local_files import SPLIT_WORDS, listed, split_of

if TYPE_CHECKING:
    from datasets import Dataset

_OF_ONE, _OF_SEVERAL = ("dataset_info.json", "state.json"), "dataset_dict.json"


def is_saved_dataset(name: str | Path) -> bool:
    """Whether a name is a folder that `save_to_disk` wrote."""
    folder = Path(name).expanduser()
    return (folder / _OF_SEVERAL).is_file() or all((folder / file).is_file() for file in _OF_ONE)


def load_saved(names: Sequence[str]) -> dict[str, Dataset] | None:
    """The splits of saved folders by their usual names; None where none of the names is one.

    A single dataset is of the split that its folder's name says, or else for training; several of a split are joined.

    Raises ValueError for a damaged folder, for folders of different columns, and for names of files between them.
    """
    from datasets import Dataset, concatenate_datasets, load_from_disk
    from datasets.exceptions import DatasetsError

    saved = [name for name in names if is_saved_dataset(name)]
    if not saved:
        return None
    others = [name for name in names if name not in saved]
    if others:
        raise ValueError(
            f"{saved[0]!r} was written by save_to_disk and {others[0]!r} was not; give the one kind or the other"
        )
    parts: dict[str, list[Dataset]] = {}
    for name in saved:
        folder = Path(name).expanduser()
        try:
            loaded = load_from_disk(str(folder))
        except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError, DatasetsError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"the folder {name!r}, written by save_to_disk, does not load ({reason}); save or copy it again"
            ) from error
        if isinstance(loaded, Dataset):
            parts.setdefault(split_of(folder, None) or "train", []).append(loaded)
            continue
        for split, rows in loaded.items():
            usual = SPLIT_WORDS.get(split.lower(), split)
            parts.setdefault(split if usual in loaded else usual, []).append(rows)
    if len(saved) == 1 and len(parts) == 1 and "train" not in parts:  # a folder of its own, called test
        parts = {"train": next(iter(parts.values()))}
    try:
        return {split: concatenate_datasets(rows) if len(rows) > 1 else rows[0] for split, rows in parts.items()}
    except ValueError as error:
        raise ValueError(f"the datasets of {listed(saved)} differ in their columns; give one of them") from error
