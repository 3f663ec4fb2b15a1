# SPDX-License-Identifier: Apache-2.0
"""What a new run in an old one's folder takes the place of: kept until nothing can be refused any more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ASIDE = ".earlier"


@contextmanager
def in_place_of(folder: Path, account: str, names: Sequence[str]) -> Iterator[None]:
    """Files and folders `names` are made in the block, and the file `account`, which says what they are. Where the
    block refuses something, those of an earlier run that were put aside come back, and else go for good."""
    try:
        yield
    except (ValueError, TypeError):
        for name in (account, *names):
            _remove(folder / name)
        put_back(folder, account, names)
        raise
    shutil.rmtree(folder / _ASIDE, ignore_errors=True)


def put_aside(folder: Path, account: str, names: Sequence[str]) -> None:
    """Moves what an earlier run has left out of the way; the account last, so that it says whether all the rest is
    there. Where there is no account, none of `names` may be there: [`put_back`] would take them for a new run's."""
    aside = folder / _ASIDE
    aside.mkdir(exist_ok=True)
    for name in (*names, account):
        if (folder / name).exists():
            (folder / name).rename(aside / name)


def put_back(folder: Path, account: str, names: Sequence[str]) -> None:
    """Undoes [`put_aside`], also one that was cut short: what the new run has made so far goes."""
    aside = folder / _ASIDE
    if not aside.is_dir():
        return
    if (aside / account).exists() or not (folder / account).exists():  # all had been put aside, or there was none
        for name in names:
            _remove(folder / name)
    if (aside / account).exists():
        (aside / account).replace(folder / account)
    for path in aside.iterdir():
        path.rename(folder / path.name)
    aside.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
