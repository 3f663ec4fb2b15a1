"""Runs the documentation's notebooks, and stores what their cells print, for the pages that are made of them.

python -m scripts.docs.run_notebooks [NAME ...]      by default all of docs/notebooks
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


@dataclass
class Executed:
    """A notebook that has run. printed: by cell, nothing for text. names: what its code has defined."""

    printed: list[str]
    names: dict[str, Any]


def execute(path: Path) -> Executed:
    """Runs the code cells of a notebook in order, in a folder that is removed afterwards."""
    module = types.ModuleType(f"notebook_{path.stem}")
    found = Executed([], vars(module))
    with _elsewhere(module):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            printed = io.StringIO()
            if cell["cell_type"] == "code":
                code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, found.names)
            found.printed.append(printed.getvalue())
    return found


@contextlib.contextmanager
def _elsewhere(module: types.ModuleType) -> Iterator[None]:
    before = os.getcwd()
    sys.modules[module.__name__] = module
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            del sys.modules[module.__name__]


def store(path: Path) -> None:
    """Writes what the cells of a notebook print into it."""
    printed = execute(path).printed
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell, text in zip(book["cells"], printed):
        if cell["cell_type"] == "code":
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell["outputs"], cell["execution_count"] = [stream] if text else [], None
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]:
        store(FOLDER / f"{name}.ipynb")
