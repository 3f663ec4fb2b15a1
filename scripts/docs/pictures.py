"""Pictures of the mechanisms: attention maps of the untrained model, and of a trained one where there is one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hf_xformers.variants import config_class, model_types

from .markup import ROOT

UNTRAINED = ROOT / "model_cards" / "maps"
TRAINED = ROOT / "docs" / "zoo" / "trained_maps"  # made by trained_maps.py, as is what follows
ABOUT = TRAINED / "about.json"
STEPS, LENGTH, BLOCK = 600, 24, 64  # of training; tokens of the pictures; tokens of the rows to learn from


def model_type(name: str) -> str:
    return name if name == "xformer" else f"xf_{name}"


def files() -> dict[str, Path]:
    """Path below the folder of pages -> the picture's file, of those that stand elsewhere."""
    return {f"zoo/maps/{path.name}": path for path in sorted(UNTRAINED.glob("*.svg"))}


@functools.cache
def trained() -> dict[str, dict[str, Any]]:
    """Model type -> what the run of its small model found; see trained_maps.py."""
    return json.loads(ABOUT.read_text(encoding="utf-8")) if ABOUT.exists() else {}


def not_trained() -> list[str]:
    """Variants that model the language of text, as a decoder or an encoder, and were not trained yet."""
    able = [kind for kind in model_types() if {"ForCausalLM", "ForMaskedLM"} & set(config_class(kind).heads)]
    return [kind for kind in able if kind not in trained()]


def of_run(found: dict[str, Any]) -> str:
    """What the picture of a trained model shows."""
    cut = ", ".join(f"`{field}={_said(value)}`" for field, value in found["cut"].items())
    kind = "a causal decoder" if found["objective"] == "clm" else "an encoder"
    return (
        f"The last layer of {kind} of two layers, trained for {found['steps']} steps on the documentation of Python's"
        f" standard library{f', with {cut}' if cut else ''}, on {LENGTH} tokens of held-out text; mean over heads."
        f" Held-out loss {found['loss']:.2f} nats per token, with token frequencies alone {found['baseline']:.2f}."
    )


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def of_variant(name: str, caption: str) -> str:
    """The pictures of a variant side by side, with what they show."""
    kind = model_type(name)
    if not (UNTRAINED / f"{kind}.svg").exists():
        return ""
    shown = [(f"maps/{kind}.svg", "Untrained", caption.strip("*"))]
    if "no map" not in trained().get(kind, {"no map": ""}):
        shown.append((f"trained_maps/{kind}.svg", "Trained", of_run(trained()[kind])))
    figures = [
        f'<figure markdown="1">\n\n![{what} attention map]({path})\n\n<figcaption markdown="1">**{what}.** {text}'
        "</figcaption>\n\n</figure>"
        for path, what, text in shown
    ]
    return "\n\n".join(["## Picture", '<div class="maps" markdown="1">', *figures, "</div>"])
