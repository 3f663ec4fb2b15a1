"""Notebooks as pages: their cells, with the outputs that are stored in them, and the file itself to take along."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from .markup import ROOT, Pages

FOLDER = ROOT / "docs" / "notebooks"
_PICTURES = {"image/svg+xml": "svg", "image/png": "png"}


def pages() -> tuple[Pages, dict[str, bytes]]:
    """The pages, and the pictures beside them."""
    made: Pages = {}
    pictures: dict[str, bytes] = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, found = notebook(path)
        made[f"notebooks/{path.stem}.md"] = text
        pictures |= found
    return made, pictures


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by their paths."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            parts += _output(output, path.stem, pictures)
    note = f"[{path.name}]({path.name}) is this page as a notebook."
    if parts and parts[0].startswith("# "):
        title, _, rest = parts[0].partition("\n")
        parts[:1] = [title, note, rest.strip()]
    else:
        parts[:0] = [f"# {path.stem.replace('_', ' ').capitalize()}", note]
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _output(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> list[str]:
    data = output.get("data", {})
    for kind, suffix in _PICTURES.items():
        if kind in data:
            name = f"notebooks/{stem}-{len(pictures)}.{suffix}"
            text = "".join(data[kind])
            pictures[name] = text.encode() if suffix == "svg" else base64.b64decode(text)
            return [f"![output]({Path(name).name})"]
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return [f"```text\n{text}\n```"] if text else []
"""Pages of the notebooks: their text, their code, and what the code prints, as it runs when the pages are built."""

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
    """A notebook that has run. cells: (kind, source, what it printed). names: what its code has defined."""

    cells: list[tuple[str, str, str]]
    names: dict[str, Any]

    @property
    def printed(self) -> str:
        return "".join(printed for _, _, printed in self.cells)


def execute(path: Path) -> Executed:
    """Runs the code cells of a notebook in order, in a folder that is removed afterwards."""
    module = types.ModuleType(f"notebook_{path.stem}")
    found = Executed([], vars(module))
    with _elsewhere(module):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            source, printed = "".join(cell["source"]), io.StringIO()
            if cell["cell_type"] == "code":
                with contextlib.redirect_stdout(printed):
                    exec(compile(source, f"{path.name}, cell {number}", "exec"), found.names)
            found.cells.append((cell["cell_type"], source, printed.getvalue()))
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


def pages() -> dict[str, str]:
    """Path below the folder of pages -> text, of every notebook."""
    return {f"notebooks/{path.stem}.md": page(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def page(path: Path) -> str:
    parts = []
    for kind, source, printed in execute(path).cells:
        parts.append(source if kind == "markdown" else f"```python\n{source}\n```")
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    title, *rest = parts
    heading, _, introduction = title.partition("\n")
    about = f"The notebook: [{path.name}]({path.name}). What its cells print they printed when this page was built."
    return "\n\n".join([heading, about, introduction.strip(), *rest]) + "\n"
