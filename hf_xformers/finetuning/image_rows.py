"""Rows of images: from folders with a folder for each class, and from whatever else rows come from."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.local_files import SPLIT_WORDS
from ..data.splitting import check_fraction, stable_fraction
from .origin import RowNames, with_origins
from .sources import load_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from .options import TaskData

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def need_pillow() -> None:
    """Raises ImportError with the remedy where images cannot be read."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "images are read with Pillow, which is not installed: pip install 'hf_xformers[vision]'"
        ) from error


def load_images(source: TaskData) -> dict[str, Dataset]:
    """All rows of a source, in its splits. A folder with images has a folder for each class, or one for each split
    with these inside; other sources are those of [`load_rows`].

    Raises:
        ValueError: as `load_rows`, a folder without images or tables, and images beside tables.
    """
    need_pillow()
    check_fraction(source.validation_fraction)
    named = {"train": source.data, "validation": source.validation_data, "test": source.test_data}
    folders = {split: [name for name in names if _has_images(name)] for split, names in named.items()}
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


def _has_images(name: str) -> bool:
    folder = Path(name).expanduser()
    return folder.is_dir() and any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.rglob("*"))


def _of_folder(name: str, one_of_several: bool) -> dict[str, Dataset]:
    """The splits of a folder, with the paths of the images as origins; of several folders one may be called as a
    split."""
    import datasets

    loaded = datasets.load_dataset("imagefolder", data_dir=str(Path(name).expanduser().resolve()))
    own = SPLIT_WORDS.get(Path(name).name.lower(), "train") if one_of_several else "train"
    splits = {}
    for split, rows in loaded.items():
        paths = [stored["path"] for stored in rows.cast_column("image", datasets.Image(decode=False))["image"]]
        found = own if len(loaded) == 1 else SPLIT_WORDS.get(str(split), "train")
        splits[found] = with_origins(rows, [repr(path) for path in paths])
    return splits


def _joined(parts: list[Dataset]) -> Dataset:
    from datasets import concatenate_datasets

    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def hold_out(splits: Mapping[str, Dataset], column: str, source: TaskData) -> dict[str, Dataset]:
    """`validation_fraction` of the training rows as validation, where there is none: by a hash of the image, so that
    equal ones are on one side. Then at most as many rows as the options say."""
    import datasets

    found = dict(splits)
    if "validation" not in found and source.validation_fraction > 0:
        rows = found["train"]
        stored = rows.cast_column(column, datasets.Image(decode=False))
        keys = [stable_fraction(hashlib.sha256(content_of(image)).hexdigest()) for image in stored[column]]
        held = [key < source.validation_fraction for key in keys]
        if len(rows) < 2:
            raise ValueError("a single training image cannot be divided; give more, or --validation_fraction 0")
        if not any(held):
            held[keys.index(min(keys))] = True
        elif all(held):
            held[keys.index(max(keys))] = False
        found["train"] = rows.select([row for row, out in enumerate(held) if not out])
        found["validation"] = rows.select([row for row, out in enumerate(held) if out])
    limits = {"train": source.max_train_rows, "validation": source.max_eval_rows, "test": source.max_eval_rows}
    for split, limit in limits.items():
        if limit is not None and split in found:
            if limit < 1:
                raise ValueError(f"--max_{'train' if split == 'train' else 'eval'}_rows {limit} must be at least 1")
            found[split] = found[split].select(range(min(limit, len(found[split]))))
    return {split: found[split] for split in ("train", "validation", "test") if split in found}


def content_of(stored: Mapping[str, Any] | None) -> bytes:
    """The bytes of an image's file. Raises OSError for one that is not there."""
    if not stored:
        return b""
    return stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()


def check_image(stored: Mapping[str, Any] | None, where: RowNames, row: int) -> None:
    """Refuses what is no image that can be read to its end, before training comes to it."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(content_of(stored))) as image:
            image.draft("RGB", (1, 1))  # a JPEG is decoded small, which takes a fraction of the time
            image.load()
            return
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ValueError(f"{where[row]} is no image that can be read ({error}); replace it or remove it") from error


__all__ = ["IMAGE_SUFFIXES", "check_image", "content_of", "hold_out", "load_images"]
