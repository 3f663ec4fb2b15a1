# SPDX-License-Identifier: Apache-2.0
"""Rows of sound: from tables of paths, and from folders with a transcript next to each file."""

from __future__ import annotations

import dataclasses
import io
import struct
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.delimited import reading_as, text_lines
from ..data.local_files import SPLIT_WORDS
from ..data.splitting import check_fraction
from .origin import RowNames, with_origins
from .sources import load_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from .options import TaskData

SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".m4a", ".aac", ".opus", ".aiff", ".aif", ".au")
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.parquet")
_PCM, _EXTENSIBLE = 1, 0xFFFE  # format tags of WAV files; the second says that a sub-format follows
_SUBFORMAT = struct.pack("<H", _PCM) + bytes.fromhex("000000001000800000aa00389b71")


def load_sounds(source: TaskData, *, transcripts: bool = True, texts: Sequence[str] = ()) -> dict[str, Dataset]:
    """All rows of a source, in its splits ([`divided`] holds some out). Columns of sound are paths, or such and bytes.

    A folder of sound has either a table (`metadata.jsonl`, `.csv`, `.tsv`) of paths and transcripts, or next to each
    file a transcript of the same name in .txt; folders within that are called as splits are those. Other sources are
    those of [`load_rows`], with a column of paths.

    transcripts: whether they are needed; else those of a folder are left out where they are not whole. texts: as of
    [`load_rows`].

    Raises:
        ValueError: as `load_rows`; files without transcripts next to others that have one, transcripts in
            another encoding, and folders without sound.
    """
    check_fraction(source.validation_fraction)
    written: dict[str, Any] = {
        name: [_table_of(entry) for entry in getattr(source, name)]
        for name in ("data", "validation_data", "test_data")
    }
    folders = [entry for entries in written.values() for entry in entries if isinstance(entry, Path)]
    if not folders:
        whole: dict[str, Any] = {"validation_fraction": 0.0, "max_train_rows": None, "max_eval_rows": None}
        return load_rows(
            dataclasses.replace(source, **written, **whole), origins=True, adjust=_beside_table, texts=texts
        )
    if len(folders) < sum(map(len, written.values())):
        raise ValueError(
            f"{str(folders[0])!r} is a folder of sound without a table, and other data is not; give the one kind or"
            " the other"
        )
    with reading_as(source.encoding, texts):
        return _of_folders(source, written, transcripts)


def _beside_table(rows: Dataset, table: Path) -> Dataset:
    """The rows with paths of sounds that are relative to the folder of their table made whole."""
    for name in rows.column_names:
        values = list(rows[name])
        if not all(isinstance(value, str) and value.lower().endswith(SOUND_SUFFIXES) for value in values):
            continue
        whole = [table.parent / value for value in values]
        known = [str(path) if path.is_file() else value for path, value in zip(whole, values)]
        features = rows.features.copy()
        rows = rows.remove_columns([name]).add_column(name, known).select_columns(list(features))
    return rows


def _table_of(name: str) -> str | Path:
    """A name that is no folder of sound, or whose folder has a table, as `load_rows` takes it; else the folder."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    table = next((folder / file for file in TABLES if (folder / file).is_file()), None)
    if table is not None:
        return str(table)
    return folder if any(_sounds(folder)) else name


def _sounds(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SOUND_SUFFIXES)


def _of_folders(source: TaskData, written: Mapping[str, Sequence[Any]], transcripts: bool) -> dict[str, Dataset]:
    found: dict[str, list[Path]] = {}
    for name, entries in written.items():
        for folder in entries:
            for path in _sounds(folder):
                inside = path.relative_to(folder).parts[:-1]
                word = next((SPLIT_WORDS[part.lower()] for part in inside if part.lower() in SPLIT_WORDS), "train")
                own = SPLIT_WORDS.get(folder.name.lower(), "train") if len(entries) > 1 and word == "train" else word
                split = {"validation_data": "validation", "test_data": "test"}.get(name, own)
                found.setdefault(split, []).append(path)
    if len(found) == 1:  # a folder that is called as a split, by itself
        found = {"train": next(iter(found.values()))} if "train" not in found else found
    if "train" not in found:
        raise ValueError(f"{source.data[0]!r} has no training sounds; name a folder of them in --data")
    return {split: _of_files(paths, transcripts) for split, paths in found.items()}


def _of_files(paths: Sequence[Path], transcripts: bool) -> Dataset:
    from datasets import Dataset

    columns: dict[str, list[str]] = {"audio": [str(path) for path in paths]}
    try:
        texts = _transcripts_beside(paths)
    except ValueError as error:
        if transcripts:
            raise
        say_left_out(error)
        texts = None
    if texts is not None:
        columns["text"] = texts
    return with_origins(Dataset.from_dict(columns), [repr(str(path)) for path in paths])


def _transcripts_beside(paths: Sequence[Path]) -> list[str] | None:
    """What is said in each sound, by the file of its name in .txt; None where no sound has one.

    Raises ValueError where some have none, and for what is not in the encoding that files are read in.
    """
    texts = [path.with_suffix(".txt") for path in paths]
    missing = [path for path, text in zip(paths, texts) if not text.is_file()]
    if missing and len(missing) < len(paths):
        raise ValueError(
            f"{str(missing[0])!r} has no transcript next to it, and other sounds of the folder have; write one to"
            f" {missing[0].with_suffix('.txt').name!r}, or remove the sound"
        )
    return None if missing else [" ".join(" ".join(text_lines(text)).split()) for text in texts]


def say_left_out(reason: ValueError) -> None:
    """Says that sounds are read without the transcripts that are there."""
    from transformers.utils import logging  # slow to load, so not before it is needed

    logging.get_logger(__name__).warning(f"the transcripts are left out: {reason}")


def find_sound(stored: Any, where: RowNames, row: int) -> str | bytes:
    """The file of a row, or its bytes: of a path, or of what the Hub's `Audio` columns hold.

    Raises ValueError for what is neither, or is not there.
    """
    if isinstance(stored, Mapping):
        if stored.get("bytes") is not None:
            return stored["bytes"]
        stored = stored.get("path")
    if not isinstance(stored, str) or not stored:
        raise ValueError(f"{where[row]} has no path of a sound but {stored!r}; correct the row")
    path = Path(stored).expanduser()
    if path.is_file():
        return str(path)
    raise ValueError(f"{where[row]} names the sound {stored!r}, and there is no such file; correct the path")


def read_sound(stored: str | bytes, name: str) -> tuple[np.ndarray, int]:
    """(samples [N] in [-1, 1], samples per second) of a sound with one channel: PCM in a WAV file by Python itself,
    other files where `soundfile` is installed. name: of the row, for messages.

    Raises ValueError for what cannot be read, and for several channels, with the remedy.
    """
    samples, rate = _wave(stored) or _any_file(stored, name)
    if samples.ndim > 1 and samples.shape[1] > 1:
        raise ValueError(
            f"{name} has {samples.shape[1]} channels, and speech is read from one; mix them down, e.g. with `ffmpeg"
            " -i IN.wav -ac 1 OUT.wav`"
        )
    return samples.reshape(-1), rate


def _wave(stored: str | bytes) -> tuple[np.ndarray, int] | None:
    """(samples [N, channels], rate) of PCM in a WAV file; None for another file."""
    content = stored if isinstance(stored, bytes) else Path(stored).read_bytes()
    try:
        with wave.open(io.BytesIO(_plain_header(content)), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    if width > 4:
        return None
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:  # without sign
        samples = np.frombuffer(raw, np.uint8).astype(np.float32) / 128.0 - 1.0
    elif width == 3:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8) | (parts[:, 1] << 16) | (parts[:, 2] << 24)
        samples = whole.astype(np.float32) / 2.0**31
    else:
        samples = np.frombuffer(raw, {2: "<i2", 4: "<i4"}[width]).astype(np.float32) / 2.0 ** (8 * width - 1)
    return samples.reshape(-1, channels), rate


def _plain_header(content: bytes) -> bytes:
    """A WAV file with an extensible header of PCM samples, which tools write for 24 bits, under the tag of plain ones:
    `wave` reads the former from Python 3.12 on. Other content as it is."""
    place = 12  # chunks, each of a name, a size and its content, follow "RIFF", a size and "WAVE"
    while content[:4] == b"RIFF" and place + 48 <= len(content):
        name, size = struct.unpack_from("<4sI", content, place)
        if name == b"fmt ":
            (tag,) = struct.unpack_from("<H", content, place + 8)
            extensible = tag == _EXTENSIBLE and size >= 40 and content[place + 32 : place + 48] == _SUBFORMAT
            plain = struct.pack("<H", _PCM)
            return content[: place + 8] + plain + content[place + 10 :] if extensible else content
        place += 8 + size + size % 2
    return content


def _any_file(stored: str | bytes, name: str) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError as error:
        raise ValueError(
            f"{name} is no WAV file of PCM samples, which is what can be read without further packages; convert it,"
            " e.g. with `ffmpeg -i IN -ac 1 OUT.wav`, or install the package soundfile"
        ) from error
    try:
        return soundfile.read(io.BytesIO(stored) if isinstance(stored, bytes) else stored, dtype="float32")
    except Exception as error:  # its classes have no base of their own
        raise ValueError(f"{name} is no sound that can be read ({error}); replace it or remove it") from error
