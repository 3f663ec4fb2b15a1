"""Pictures of the mechanisms: attention maps of the untrained model, and of a trained one where there is one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from .markup import ROOT

UNTRAINED = ROOT / "model_cards" / "maps"
TRAINED = ROOT / "docs" / "zoo" / "trained_maps"  # made by trained_maps.py


def model_type(name: str) -> str:
    return name if name == "xformer" else f"xf_{name}"


def files() -> dict[str, Path]:
    """Path below the folder of pages -> the picture's file, of those that stand elsewhere."""
    return {f"zoo/maps/{path.name}": path for path in sorted(UNTRAINED.glob("*.svg"))}


@functools.cache
def trained() -> dict[str, Any]:
    """Model type -> what the picture of its trained model shows."""
    about = TRAINED / "about.json"
    return json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}


def of_variant(name: str, caption: str) -> str:
    """The pictures of a variant side by side, with what they show."""
    kind = model_type(name)
    if not (UNTRAINED / f"{kind}.svg").exists():
        return ""
    shown = [(f"maps/{kind}.svg", "Untrained", caption.strip("*"))]
    if kind in trained():
        shown.append((f"trained_maps/{kind}.svg", "Trained", trained()[kind]))
    figures = [
        f'<figure markdown="1">\n\n![{what} attention map]({path})\n\n<figcaption markdown="1">**{what}.** {text}'
        "</figcaption>\n\n</figure>"
        for path, what, text in shown
    ]
    return "\n\n".join(["## Picture", '<div class="maps" markdown="1">', *figures, "</div>"])
