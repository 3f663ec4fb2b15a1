# SPDX-License-Identifier: Apache-2.0
"""Files of saved models and runs: read with a word about what is wrong, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# By order of preference: one file of weights, and the index of several.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Every file of weights or index that a model is saved in, as a whole or in shards.
_ANY_WEIGHTS = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?")
STAGING = ".saving"
# What a run leaves in its folder: what it is, the lock while it runs, and Trainer's state in every checkpoint.
SUMMARY_FILE, LOCK_FILE, STATE_FILE = "training_summary.json", ".hf_xformers.lock", "trainer_state.json"
SHARDED_OPTIMIZER = "optimizer_shards"  # of a checkpoint, in place of a file for all processes
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def holds_run(folder: Path) -> bool:
    """Whether a run has left its results, or a checkpoint, in this very folder."""
    if any((folder / name).is_file() for name in (SUMMARY_FILE, STATE_FILE)):
        return True
    return any(path.is_dir() and CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoint-*"))


# ---------------------------------------------------------------------------------------------------- reading


def read_object(path: str | Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut off, no JSON, or holds a list, a number or null.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{str(path)!r} is no valid JSON; save, copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{str(path)!r} holds {_what(content)} where there should be an object {{...}}; save, copy or download it"
            " again"
        )
    return content


def _what(content: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(content), f"the value {content!r}")


def refuse_damaged_weights(name: str | Path) -> None:
    """Says what is wrong with the weights of a model's folder before anything reads them, and that pickles among them
    hold nothing but tensors.

    Raises:
        ValueError: a file is missing, cut off, or no safetensors; an index is broken or names files outside the
            folder; a pickle holds code.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    problem = weights_defect(folder)
    if problem is not None:
        raise ValueError(f"the model {str(name)!r} cannot be loaded: {problem}; copy or save it again")
    for path in weight_files(folder):
        if path.suffix == ".bin" and (found := _code_in(path)):
            raise ValueError(
                f"{str(path)!r} holds code ({found}) next to tensors, which is not run; take the model as safetensors,"
                " or save its `state_dict()` alone"
            )


def weight_files(folder: Path) -> list[Path]:
    """The files that a model's weights are read from; none where there are none. Raises as [`weights_defect`]
    explains."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / part for part in _parts(index)]
    return []


def stored_weights(folder: Path) -> set[str]:
    """The names of all files of a model's weights and of their indexes, whether anything is read from them or not."""
    return {path.name for path in folder.iterdir() if _ANY_WEIGHTS.fullmatch(path.name)}


def tensors_of(path: Path, names: Container[str]) -> dict[str, Any]:
    """Those of `names` that a file of weights holds, on the CPU. A pickle has to have been looked into
    ([`refuse_damaged_weights`])."""
    import torch
    from safetensors import safe_open

    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if key in names}
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {key: tensor for key, tensor in state.items() if key in names}


def weights_defect(folder: Path) -> str | None:
    """Why the weights of a folder cannot be read, in a few words; None where nothing is wrong, or there are none."""
    try:
        files = weight_files(folder)
    except ValueError as error:
        return str(error)
    for path in files:
        if not path.is_file():
            return f"it has no {path.name}"
        problem = safetensors_defect(path) if path.suffix == ".safetensors" else None
        if problem is not None:
            return f"its {path.name} {problem}"
    return None


def _parts(index: Path) -> list[str]:
    try:
        names = read_object(index)["weight_map"].values()
        names = sorted(set(names))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"its {index.name} is cut off or no index") from None
    for name in names:
        if not isinstance(name, str) or name in (".", "..") or Path(name).name != name:
            raise ValueError(f"its {index.name} names the file {name!r}, which is not in the folder")
    return names


def safetensors_defect(path: Path) -> str | None:
    """What is wrong with a safetensors file, in a few words; None if it is whole: 8 bytes with the header's length, a
    JSON header of shapes and places, and tensors that fill the rest."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            return "is cut off"
        if length > _LONGEST_HEADER:
            return "is no safetensors file"
        try:
            header = json.loads(file.read(length))
            ends = [_end(entry) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            return "is no safetensors file, or its header is damaged"
    return None if size == 8 + length + max(ends, default=0) else "is cut off"


def stored_types(path: Path) -> dict[str, str]:
    """The number format of each tensor of a safetensors file that [`safetensors_defect`] finds whole ("F32", "I8",
    ...), without reading the tensors."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: str(entry.get("dtype")) for name, entry in header.items() if name != "__metadata__"}


def _end(entry: Any) -> int:
    first, last = entry["data_offsets"]
    if not 0 <= first <= last or any(size < 0 for size in entry["shape"]) or not math.isfinite(last):
        raise ValueError
    return last


def _code_in(path: Path) -> str | None:
    """What a pickle of tensors should not hold, or why it cannot be read; None where loading runs no code."""
    import pickle

    import torch

    if zipfile.is_zipfile(path):
        try:
            found = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(
                f"{str(path)!r} cannot be read ({_first_line(error)}); copy or download it again"
            ) from None
        return ", ".join(sorted(found)) or None
    try:  # the format before torch 1.6 has no table of contents: the safe reader itself says
        torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        found = [line for line in str(error).splitlines() if "GLOBAL" in line]
        return found[0].strip() if found else "an object that is no tensor"
    except (RuntimeError, ValueError, EOFError, OSError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read ({_first_line(error)}); copy or download it again") from None
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


# ---------------------------------------------------------------------------------------------------- writing


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once, so that no reader finds half of it, and a full disk leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """[`write_text`] of a JSON value."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def saving_into(folder: Path) -> Iterator[Path]:
    """A scratch folder whose files go to `folder`, each at once, when the block ends well; else `folder` stays as it
    was. Weights of an earlier model go, its shards among them: readers would prefer them, or take them along."""
    fresh = not folder.exists()
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        saved = stored_weights(staging)
        move_files(staging, folder)
        for name in stored_weights(folder) - saved if saved else ():
            (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if fresh:
            with suppress(OSError):  # it holds what was saved
                folder.rmdir()


def move_files(source: Path, target: Path) -> None:
    """Moves every file, with its subfolder, over the one of its name. Both folders are on one disk."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)


def _content(folder: Path) -> dict[str, int]:
    """What a folder holds, and when it was changed; empty where there is none."""
    return {entry.name: entry.stat().st_mtime_ns for entry in folder.iterdir()} if folder.is_dir() else {}


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A scratch folder next to `folder` that takes its place when the block ends well; else `folder` stays as it was.

    Raises:
        ValueError: another process has written to `folder` meanwhile; its files stay.
    """
    folder = folder.absolute()
    before = _content(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:8]
    scratch = folder.parent / f".{folder.name}.{token}.new"
    old = folder.parent / f".{folder.name}.{token}.old"
    scratch.mkdir()
    try:
        yield scratch
        if _content(folder) != before:
            raise ValueError(f"Another process has written to {str(folder)!r} meanwhile; give another folder.")
        if folder.exists():
            folder.rename(old)
        try:
            scratch.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
