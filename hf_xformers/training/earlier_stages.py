"""What a new linearisation in an old one's folder takes the place of: kept until nothing can be refused any more."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..conversion.linearization import FILE

_ASIDE = ".earlier"


def put_aside(folder: Path, names: Sequence[str]) -> None:
    """Moves the account of the earlier run and its folders `names` out of the way; the account last, so that it says
    whether all the rest is there."""
    aside = folder / _ASIDE
    aside.mkdir(exist_ok=True)
    for name in (*names, FILE):
        if (folder / name).exists():
            (folder / name).rename(aside / name)


def put_back(folder: Path, names: Sequence[str]) -> None:
    """Undoes [`put_aside`], also one that was cut short: what the new run has made so far goes."""
    aside = folder / _ASIDE
    if not aside.is_dir():
        return
    if (aside / FILE).exists():
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)
        (aside / FILE).replace(folder / FILE)
    for path in aside.iterdir():
        path.rename(folder / path.name)
    aside.rmdir()


def forget(folder: Path) -> None:
    """Removes what was put aside, for good."""
    shutil.rmtree(folder / _ASIDE, ignore_errors=True)


__all__ = ["forget", "put_aside", "put_back"]
