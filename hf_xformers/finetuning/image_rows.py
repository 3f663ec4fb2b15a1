# SPDX-License-Identifier: Apache-2.0
"""Rows of images: from folders with a folder for each class, and from whatever else rows come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..data.images import UNREADABLE, checked_size, divide_images, has_images, image_folder, need_pillow
from ..data.splitting import check_fraction
from .origin import RowNames, with_origins
from .sources import limited, load_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from .options import TaskData


def load_images(source: TaskData) -> dict[str, Dataset]:
    """All rows of a source, in its splits. A folder with images has a folder for each class, or one for each split
    with these inside; other sources are those of [`load_rows`].

    Raises:
        ValueError: as `load_rows`, a folder without images or tables, and images next to tables.
    """
    need_pillow()
    check_fraction(source.validation_fraction)
    named = {"train": source.data, "validation": source.validation_data, "test": source.test_data}
    folders = {split: [name for name in names if has_images(name)] for split, names in named.items()}
    if not any(folders.values()):
        # Images are held out by what they show, and limits come after that.
        whole = dataclasses.replace(source, validation_fraction=0.0, max_train_rows=None, max_eval_rows=None)
        return load_rows(whole, origins=True)
    splits: dict[str, Dataset] = {}
    for split, names in named.items():
        if len(folders[split]) < len(names):
            other = next(name for name in names if name not in folders[split])
            raise ValueError(f"{other!r} is no folder with images, and other data is; give the one kind or the other")
        parts: dict[str, list[Dataset]] = {}
        for name in names:
            for found, rows in _of_folder(name, one_of_several=len(names) > 1).items():
                parts.setdefault(found if split == "train" else split, []).append(rows)
        splits |= {found: _joined(rows) for found, rows in parts.items()}
    if "train" not in splits:
        raise ValueError(f"{source.data[0]!r} has no training images; name a folder of them in --data")
    return splits


def _of_folder(name: str, one_of_several: bool) -> dict[str, Dataset]:
    """The splits of a folder, with the paths of the images as origins; of several folders one may be called as a
    split."""
    import datasets

    splits = {}
    for split, rows in image_folder(name, alone=not one_of_several).items():
        paths = [stored["path"] for stored in rows.cast_column("image", datasets.Image(decode=False))["image"]]
        splits[split] = with_origins(rows, [repr(path) for path in paths])
    return splits


def _joined(parts: list[Dataset]) -> Dataset:
    """The rows of several folders, with the classes of all."""
    from datasets import ClassLabel, concatenate_datasets

    classes = [getattr(rows.features.get("label"), "names", ()) for rows in parts]
    names = sorted({name for own in classes for name in own})
    for place, (rows, own) in enumerate(zip(parts, classes)):
        if own and list(own) != names:
            ids = [names.index(own[label]) for label in rows["label"]]
            rows = rows.remove_columns("label").add_column("label", ids)
            parts[place] = rows.cast_column("label", ClassLabel(names=names))
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def hold_out(splits: Mapping[str, Dataset], column: str, source: TaskData) -> dict[str, Dataset]:
    """`validation_fraction` of the training rows as validation, where there is none: by a hash of the image, so that
    equal ones are on one side; and they are [`limited`]."""
    found = dict(splits)
    if "validation" not in found and source.validation_fraction > 0:
        found["train"], found["validation"] = divide_images(found["train"], column, source.validation_fraction)
    return limited(found, source)


def check_image(stored: Mapping[str, Any] | None, where: RowNames, row: int) -> tuple[int, int]:
    """Height and width of an image. Raises ValueError for what is none that can be read to its end."""
    try:
        return checked_size(stored)
    except UNREADABLE as error:
        raise ValueError(f"{where[row]} is no image that can be read ({error}); replace it or remove it") from error
