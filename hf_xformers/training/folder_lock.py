# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a folder: two that write their checkpoints into the same one would lose one result."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..core.saved_files import LOCK_FILE
from .checkpoints import where_it_stands

_held: set[Path] = set()


@contextmanager
def folder_lock(folder: str | Path, *, writes: bool = True, option: str = "--output_dir") -> Iterator[None]:
    """Keeps other processes that ask for the same folder out of it while the block runs.

    The lock is the operating system's own, on the file `.hf_xformers.lock` in the folder, so it ends with the process,
    however that ends; the file says which process on which host holds it, and is removed at the end. Inside the block
    the same process may ask again. writes: whether this process is the one that writes (of the processes of one run
    the main one takes the lock for all). option: what the folder was given by, for messages.

    Raises:
        ValueError: another process has the folder, or it is a file.
        OSError: nothing can be written there.
        KeyboardInterrupt: with how to continue, where the block was interrupted.
    """
    folder = Path(folder).expanduser()
    place = folder.absolute()
    if not writes or place in _held:
        yield
        return
    made = _make(folder, option)
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another process{_holder(folder)} is writing to {option} {str(folder)!r}; wait until it has ended, or"
            " take another folder"
        ) from None
    _held.add(place)
    try:
        with suppress(OSError):  # it says who holds the lock, and is not the lock
            Path(lock.lock_file).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(where_it_stands(folder, int(os.environ.get("WORLD_SIZE", "1")))) from None
    finally:
        _held.discard(place)
        with suppress(OSError):  # while it is held, so that nobody else's file is removed
            os.unlink(lock.lock_file)
        lock.release()
        if made:
            with suppress(OSError):  # what was refused leaves no empty folder behind
                folder.rmdir()


def _make(folder: Path, option: str) -> bool:
    """Makes the folder where there is none, and says whether it did."""
    try:
        if folder.is_dir():
            return False
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise ValueError(f"{option} {str(folder)!r} is a file; give a folder") from None
    return True


def _holder(folder: Path) -> str:
    """Who holds the lock, as far as its file says."""
    try:
        known = json.loads((folder / LOCK_FILE).read_text())
        return f" (process {known['pid']} on {known['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
