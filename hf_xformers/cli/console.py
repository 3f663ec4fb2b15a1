# SPDX-License-Identifier: Apache-2.0
"""What the commands print: results on standard output, messages on standard error, and only in the main process.

A terminal gets text that is wrapped at its width; a pipe or a file gets one line for each thing, nothing cut, no
colors.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

_PACKAGE = str(Path(__file__).resolve().parents[1])
_SHORTEST = 40  # columns; a narrower terminal wraps by itself


def is_main_process() -> bool:
    """Whether this process is the one that speaks (rank 0 under a launcher)."""
    return os.environ.get("RANK", "0") == "0"


def width() -> int | None:
    """Columns of standard output; None where it is no terminal (and COLUMNS does not say otherwise)."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return max(_SHORTEST, shutil.get_terminal_size().columns)


def error_console() -> Console:
    """Standard error, for progress that moves: of use only on a terminal."""
    return Console(stderr=True, quiet=not is_main_process(), highlight=False)


def show(text: str = "", indent: int = 0, hanging: int | None = None) -> None:
    """A line of a result. On a terminal it is wrapped between words, from the second line on with `hanging` spaces."""
    if not is_main_process():
        return
    columns = width()
    hanging = indent if hanging is None else hanging
    line = " " * indent + text
    if columns is not None and len(line) > columns and text:
        line = textwrap.fill(
            text,
            columns,
            initial_indent=" " * indent,
            subsequent_indent=" " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    print(line.rstrip())


def say(text: str) -> None:
    """A line about the progress of a command."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


def is_refusal(error: Exception) -> bool:
    """Whether somebody wrote a `raise` for this error. Anything else is a bug, for its traceback."""
    origin = _origin(error)
    wrote = origin is None or not origin.line or origin.line.startswith("raise")
    return wrote and isinstance(error, (ValueError, TypeError))


@contextmanager
def in_options(names: Mapping[str, str]) -> Iterator[None]:
    """Says a refusal in the options of a command where the function below speaks of its own: names are arguments as
    they stand between backticks (`name` or `name=value`), or options of another command."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not is_refusal(error):
            raise
        text = re.sub(
            r"`((\w+)(?:=[^`]*)?)`", lambda found: names.get(found[1], names.get(found[2], found[0])), str(error)
        )
        for option in (name for name in names if name.startswith("--")):
            text = re.sub(rf"{option}\b", names[option], text)
        raise type(error)(text) from error


def _origin(error: Exception) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1] if frames else None


def print_error(error: Exception, text: str | None = None) -> None:
    """One paragraph: `text`, or what the error says. One process of each machine prints it, as a file may be missing
    on one machine only; the others find the same, or stumble over what the first has left."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    rank = os.environ.get("RANK", "0")
    who = "hf-xformers" if rank == "0" else f"hf-xformers (process {rank})"
    text = " ".join((text or str(error)).split()) or type(error).__name__
    origin = _origin(error)
    if origin is not None and not origin.filename.startswith(
        _PACKAGE
    ):  # perhaps no matter of input: say how to see more
        text += " (hf-xformers --debug COMMAND ... shows where this comes from)"
    print(f"{who}: error: {text}", file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """A title and aligned columns. Where the terminal is too narrow for a row, its last column continues below
    itself."""
    cells = [[*columns], *([cell_text(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    show(title)
    for row in cells:
        padded = [text.ljust(size) for text, size in zip(row[:-1], widths)]
        _row("  " + "".join(f"{text}  " for text in padded), row[-1])


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Names and values; values of None are left out."""
    kept = {name: cell_text(value) for name, value in facts.items() if value is not None}
    size = max(map(len, kept), default=0)
    show(title)
    for name, text in kept.items():
        _row(f"  {name.ljust(size)}  ", text)


def _row(start: str, text: str) -> None:
    """`start` as it is, then `text`, wrapped under itself where the line is too long."""
    columns = width()
    room = None if columns is None else columns - len(start)
    if room is None or len(text) <= room or room < 8:
        lines = [text]
    else:
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        if is_main_process():
            print(((start if number == 0 else " " * len(start)) + line).rstrip())


def share_text(share: float) -> str:
    """A share of 1 in percent with one decimal."""
    return f"{share:.1%}"


def cell_text(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return str(value)
