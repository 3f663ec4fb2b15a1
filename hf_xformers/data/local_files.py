# SPDX-License-Identifier: Apache-2.0
"""Which local files a text source names, and which split each of them belongs to."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.saved_files import LOCK_FILE, holds_run
from .stdlib_corpus import STDLIB_CORPUS_ID

_FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_BESIDE = ("readme", "license", "licence")  # stems of files next to the data that are not data
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# A word of a file, folder or Hub split name -> the split it stands for.
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
}


def find_files(names: list[str]) -> dict[str, list[Path]] | None:
    """Split -> files; None when the source is a single name that can only be a Hub id.

    Raises ValueError when a name matches nothing, or nothing but empty files.
    """
    found: dict[Path, Path | None] = {}  # file -> the folder that was named, whose own name says nothing about splits
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = files_under(path, lambda file: format_of(file) is not None)
            if not inside:
                raise ValueError(
                    f"the folder {name!r} holds no file with a known suffix ({', '.join(_FORMATS)}); "
                    f"give a pattern such as {os.path.join(name, '*')!r} to read other files as text"
                )
            found.update(dict.fromkeys(inside, path))
        elif path.is_file():
            found[path] = None
        elif glob.has_magic(name):
            matches = sorted(p for m in glob.glob(str(path), recursive=True) if (p := Path(m)).is_file())
            if not matches:
                raise ValueError(
                    f"the pattern {name!r} matches no file (looked from {os.getcwd()!r}); correct the path"
                )
            found.update(dict.fromkeys(matches))
        elif len(names) > 1 or _looks_like_a_path(name):
            raise ValueError(
                f"there is no file or folder {name!r} (looked from {os.getcwd()!r}); give the path of a text, JSONL, "
                "CSV or Parquet file, of a folder of them, or a glob pattern"
            )
        elif not _HUB_ID.fullmatch(name):
            raise ValueError(
                f"source={name!r} is neither {STDLIB_CORPUS_ID!r}, nor an existing file, folder or glob pattern, nor "
                "the id of a Hub dataset; give one of these"
            )
        else:
            return None
    filled = [path for path in found if path.stat().st_size > 0]
    if not filled:
        raise ValueError(f"{listed(names)} is empty (0 bytes); give a file that holds text")
    marks = [split_of(path, found[path]) for path in filled]
    if len(filled) == 1 or "train" not in marks:  # then dev-notes.md or test_01.txt is no statement about splits
        return {"train": filled}
    files: dict[str, list[Path]] = {}
    for path, mark in zip(filled, marks, strict=True):
        files.setdefault(mark or "train", []).append(path)
    return files


def holds_text(name: str) -> bool:
    """Whether a folder has files of text somewhere in it, next to a README or a license."""
    inside = Path(name).expanduser().rglob("*")
    return any(format_of(path) == "text" and path.stem.lower() not in _BESIDE for path in inside)


def refuse_run(folder: Path) -> None:
    """Raises ValueError for the folder of a training run."""
    if holds_run(folder):
        raise ValueError(
            f"the folder {str(folder)!r} is that of a training run, whose predictions and settings are no data; name"
            " the files to read, or keep them in a folder of their own"
        )


def files_under(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """The files in a folder and the folders in it that are `wanted`, sorted; nothing hidden, and nothing that a
    training run has written: a folder of a run is left out, with a word about it.

    Raises:
        ValueError: the folder itself is that of a run.
    """
    refuse_run(folder)
    found: list[Path] = []
    others: list[Path] = []
    runs: list[str] = []
    for place, folders, files in os.walk(folder):
        inner = sorted(name for name in folders if not name.startswith("."))
        ran = [name for name in inner if holds_run(Path(place, name)) or Path(place, name, LOCK_FILE).exists()]
        runs += [str(Path(place, name)) for name in ran]
        folders[:] = [name for name in inner if name not in ran]
        for path in (Path(place, name) for name in files if not name.startswith(".")):
            if path.is_file() and path.stem.lower() not in _BESIDE:
                (found if wanted(path) else others).append(path)
    said = [f"left out of the data, as training runs wrote them: {listed(runs)}"] if runs else []
    if found and (others or len({path.suffix for path in found}) > 1):
        said.append(f"of the folder {str(folder)!r} are read: {_endings(found)}")
        said[-1] += f"; left out: {_endings(others)}" if others else ""
    if said:
        from transformers.utils import logging  # slow to load, so not before it is needed

        for line in said:
            logging.get_logger(__name__).warning(line)
    return sorted(found)


def _endings(paths: Sequence[Path]) -> str:
    """How many files have which endings, in words."""
    counts = Counter(path.suffix.lower() or "(no ending)" for path in paths)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items()))


def _looks_like_a_path(name: str) -> bool:
    path = Path(name)
    return name.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2 or format_of(path) is not None


def format_of(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in _COMPRESSIONS:
        suffixes = suffixes[:-1]
    return _FORMATS.get(suffixes[-1].lower()) if suffixes else None


def split_of(path: Path, folder: Path | None) -> str | None:
    """The split that a file's name, or else a folder between it and `folder`, stands for; None when none does."""
    parts = [path.name, *reversed(path.relative_to(folder).parent.parts)] if folder is not None else [path.name]
    for part in parts:
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
