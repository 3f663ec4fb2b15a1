"""What the commands print: tables on standard output, messages on standard error, and only in the main process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGE = str(Path(__file__).resolve().parents[1])


def is_main_process() -> bool:
    """Whether this process is the one that speaks (rank 0 under a launcher)."""
    return os.environ.get("RANK", "0") == "0"


def console(*, error: bool = False) -> Console:
    return Console(stderr=error, quiet=not is_main_process(), highlight=False)


def say(text: str) -> None:
    """A line about the progress of a command."""
    console(error=True).print(text, markup=False, soft_wrap=True)


def is_refusal(error: Exception) -> bool:
    """Whether somebody wrote a `raise` for this error. Anything else is a bug, for its traceback."""
    origin = _origin(error)
    wrote = origin is None or not origin.line or origin.line.startswith("raise")
    return wrote and isinstance(error, (ValueError, TypeError))


def _origin(error: Exception) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1] if frames else None


def print_error(error: Exception, text: str | None = None) -> None:
    """One paragraph: `text`, or what the error says. Every process prints its own: a file may be missing on one machine only."""
    rank = os.environ.get("RANK", "0")
    who = "hf-xformers" if rank == "0" else f"hf-xformers (process {rank})"
    text = " ".join((text or str(error)).split()) or type(error).__name__
    origin = _origin(error)
    if origin is not None and not origin.filename.startswith(
        _PACKAGE
    ):  # perhaps no matter of input: say how to see more
        text += " (hf-xformers --debug COMMAND ... shows where this comes from)"
    print(f"{who}: error: {text}", file=sys.stderr)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """A table of names and values; values of None are left out."""
    print_table(title, ("", ""), ((name, value) for name, value in facts.items() if value is not None))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    else:
        text = str(value)
    return text.replace("[", r"\[")
