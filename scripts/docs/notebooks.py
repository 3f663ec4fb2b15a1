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
    """The pages, and the pictures next to them."""
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
