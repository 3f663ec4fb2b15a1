# SPDX-License-Identifier: Apache-2.0
"""Images to train on: folders, saved datasets, Parquet files and the Hub, in splits with the one column `image`."""

from __future__ import annotations

import glob
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.saved_files import holds_run
from .local_files import SPLIT_WORDS, listed, refuse_run, split_of
from .picture_modes import check_mode
from .saved import load_saved
from .sources import choose_train, hub_errors, no_config, read_files
from .splitting import check_fraction, divide_rows, stable_fraction

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError)  # what Pillow raises for files that are no whole image


def need_pillow() -> None:
    """Raises ImportError with the remedy where images cannot be read."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "images are read with Pillow, which is not installed: pip install 'hf_xformers[vision]'"
        ) from error


def has_images(name: str) -> bool:
    """Whether a name is that of a folder with images somewhere in it."""
    folder = Path(name).expanduser()
    return folder.is_dir() and any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.rglob("*"))


def content_of(stored: Mapping[str, Any] | None) -> bytes:
    """The bytes of an image's file. Raises OSError for one that is not there."""
    if not stored:
        return b""
    return stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()


def image_folder(name: str | Path, *, alone: bool, **options: Any) -> dict[str, Dataset]:
    """The images in a folder and the folders in it, by the splits that folders, or else files, are called after; but
    for the pictures that training runs have drawn.

    alone: not one of several folders, which may be called after a split itself. options: of the reader of `datasets`.
    Raises ValueError where the folder itself is that of a run.
    """
    import datasets

    place = Path(name).expanduser().resolve()
    refuse_run(place)
    # All as one split: left to itself, the reader takes `train.csv` next to the images for all of a split.
    rows = datasets.load_dataset("imagefolder", data_files=f"{glob.escape(str(place))}/**", split="train", **options)
    stored = rows.cast_column("image", datasets.Image(decode=False))["image"]
    paths = [Path(image["path"]) for image in stored]
    marks = [split_of(path.parent / "_", place) if path.is_relative_to(place) else None for path in paths]
    if not any(marks):
        marks = [split_of(path, None) for path in paths]
    runs = {folder for folder in {path.parent for path in paths} if holds_run(folder)}
    own = "train" if alone else SPLIT_WORDS.get(Path(name).name.lower(), "train")
    splits: dict[str, list[int]] = {}
    for row, (path, mark) in enumerate(zip(paths, marks)):
        if path.parent not in runs:
            splits.setdefault((mark or "train") if "train" in marks else own, []).append(row)
    return {split: rows.select(found) for split, found in splits.items()}


def load_image_dataset(
    names: Sequence[str],
    *,
    split: str | None = None,
    column: str | None = None,
    config_name: str | None = None,
    validation_fraction: float = 0.05,
) -> dict[str, Dataset]:
    """The splits `train` and, unless `validation_fraction` is 0, `validation`, each with the one column `image`.

    names: folders with images (in folders by split and class, or not), folders that `save_to_disk` wrote, Parquet
    files, or one id of a Hub dataset. split: the one to train on, or a slice of one. column: of the images; default:
    the only one of images. Where there is no validation split, images are held out by a hash of their files, equal
    ones on one side.

    Raises:
        ValueError: no images there, no such split or column, or a file that is no image.
    """
    need_pillow()
    check_fraction(validation_fraction)
    found = _splits(names, config_name)
    splits = choose_train({name: _images_alone(rows, column, names) for name, rows in found.items()}, split, names)
    if not len(splits["train"]):
        raise ValueError(f"the training split of {listed(names)} holds no image; give one that does")
    if "validation" not in splits and validation_fraction > 0:
        splits["train"], splits["validation"] = divide_images(splits["train"], "image", validation_fraction)
    if validation_fraction == 0:
        splits.pop("validation", None)
    return {name: splits[name] for name in ("train", "validation") if name in splits}


def _splits(names: Sequence[str], config_name: str | None) -> dict[str, Dataset]:
    import datasets

    if not names:
        raise ValueError("there are no images to read; give a folder of them with --data")
    saved = load_saved(names)
    if saved is not None or Path(names[0]).expanduser().exists():
        no_config(config_name, names)
    if saved is not None:
        return saved
    parts: dict[str, list[Dataset]] = {}
    for name in names:
        path = Path(name).expanduser()
        if has_images(name):
            loaded: Mapping[str, Dataset] = image_folder(path, alone=len(names) == 1, drop_labels=True)
        elif path.is_file() and path.suffix.lower() == ".parquet":
            own = "train" if len(names) == 1 else split_of(path, None) or "train"
            loaded = {own: read_files("parquet", [str(path)])[0]}
        elif path.exists() or len(names) > 1 or name == "stdlib":
            what = "a folder" if path.is_dir() else "no folder"
            raise ValueError(
                f"{name!r} is {what} without images ({', '.join(IMAGE_SUFFIXES[:4])}, ...), and this model reads"
                " images; give a folder of images, a Parquet file or a saved dataset with a column of images, or take"
                " a --variant that reads text"
            )
        else:
            with hub_errors(name, config_name):
                loaded = datasets.load_dataset(name, config_name)
        for split, rows in loaded.items():
            parts.setdefault(SPLIT_WORDS.get(str(split), str(split)), []).append(rows)
    return {split: rows[0] if len(rows) == 1 else datasets.concatenate_datasets(rows) for split, rows in parts.items()}


def _images_alone(rows: Dataset, column: str | None, names: Sequence[str]) -> Dataset:
    import datasets

    of_images = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if column is not None and column not in rows.features:
        raise ValueError(f"{listed(names)} has no column {column!r}; its columns are {list(rows.features)}")
    if column is None and len(of_images) != 1:
        kinds = f"columns of images {of_images}" if of_images else f"no column of images among {list(rows.features)}"
        raise ValueError(f"{listed(names)} has {kinds}; name the one to read with --image_column")
    chosen = column or of_images[0]
    rows = rows.select_columns([chosen]).with_format(None)
    rows = rows if chosen == "image" else rows.rename_column(chosen, "image")
    return rows.cast_column("image", datasets.Image())


def divide_images(rows: Dataset, column: str, fraction: float) -> tuple[Dataset, Dataset]:
    """(train, validation) by a hash of each image's file. Raises ValueError for a single image."""
    import datasets

    stored = rows.cast_column(column, datasets.Image(decode=False))
    if len(rows) < 2:
        raise ValueError("a single training image cannot be divided; give more, or --validation_fraction 0")
    keys = [stable_fraction(hashlib.sha256(content_of(image)).hexdigest()) for image in stored[column]]
    return divide_rows(rows, keys, fraction)


def checked_size(stored: Mapping[str, Any] | None) -> tuple[int, int]:
    """Height and width of an image as it is decoded, turned as its camera says. Reads it to its end, before training
    comes to it. Raises what is `UNREADABLE`."""
    import PIL.ExifTags
    import PIL.Image

    with PIL.Image.open(io.BytesIO(content_of(stored))) as image:
        height, width = image.height, image.width
        image.draft("RGB", (1, 1))  # a JPEG is decoded small, which takes a fraction of the time
        image.load()
        check_mode(image)
        lying = image.getexif().get(PIL.ExifTags.Base.Orientation) in (5, 6, 7, 8)  # known once all is read
        return (width, height) if lying else (height, width)


def sizes_of(rows: Dataset) -> list[tuple[int, int]]:
    """Height and width of every image of the column `image`. Raises ValueError for what is no whole image."""
    import datasets

    found = []
    for row, stored in enumerate(rows.cast_column("image", datasets.Image(decode=False))["image"]):
        try:
            found.append(checked_size(stored))
        except UNREADABLE as error:
            raise ValueError(
                f"image {row} ({(stored or {}).get('path') or 'without a path'}) cannot be read ({error}); replace it"
                " or remove it"
            ) from error
    return found


def one_size(sizes: Iterable[tuple[int, int]], names: Sequence[str]) -> tuple[int, int]:
    """The size that all images have. Raises ValueError where they differ."""
    known = sorted(set(sizes))
    if len(known) > 1:
        shown = ", ".join(f"{height} x {width}" for height, width in known[:4])
        more = f" and {len(known) - 4} more" if len(known) > 4 else ""
        raise ValueError(
            f"the images of {listed(names)} have {len(known)} sizes ({shown}{more} pixels); give one to all with"
            " --resize HEIGHT WIDTH"
        )
    return known[0]
