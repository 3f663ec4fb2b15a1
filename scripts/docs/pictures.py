"""Pictures of the mechanisms: attention maps of the untrained model, and of a trained one where there is one."""

from __future__ import annotations

import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from hf_xformers.variants import config_class, model_types

from .markup import ROOT

UNTRAINED = ROOT / "model_cards" / "maps"
TRAINED = ROOT / "docs" / "zoo" / "trained_maps"  # made by trained_maps.py, as is what follows
ABOUT = TRAINED / "about.json"
STEPS, LENGTH, BLOCK = 600, 24, 64  # of training; tokens of the pictures; tokens of the rows to learn from
SEEDS = (0, 1, 2)
DENSE = {"clm": "xf_gpt2", "mlm": "xf_bert/mlm"}  # with learned positions
BASELINES = [f"{key}{kind}" for key in DENSE.values() for kind in ("", "/none", "/rotary", "/sinusoidal_absolute")]


def model_type(name: str) -> str:
    return name if name == "xformer" else f"xf_{name}"


def files() -> dict[str, Path]:
    """Path below the folder of pages -> the picture's file, of those that stand elsewhere."""
    return {f"zoo/maps/{path.name}": path for path in sorted(UNTRAINED.glob("*.svg"))}


@functools.cache
def trained() -> dict[str, dict[str, Any]]:
    """Model type -> what the run of its small model found; see trained_maps.py."""
    return json.loads(ABOUT.read_text(encoding="utf-8")) if ABOUT.exists() else {}


def seeds_left(key: str) -> tuple[int, ...]:
    """Seeds with which a variant was not trained yet; none for one that cannot be trained this way."""
    found = trained().get(key, {})
    return () if "no map" in found and "losses" not in found else SEEDS[len(found.get("losses", [])) :]


def unfinished() -> list[str]:
    """Baselines, and variants that model the language of text as a decoder or an encoder, that miss a run."""
    able = [kind for kind in model_types() if {"ForCausalLM", "ForMaskedLM"} & set(config_class(kind).heads)]
    return [key for key in dict.fromkeys((*BASELINES, *able)) if seeds_left(key)]


def alike() -> list[dict[str, Any]]:
    """A row of each variant that was trained, next to dense attention with the same objective and position (learned
    ones where the variant has others); decoders first, and in each kind the lowest loss."""
    rows = []
    for key, found in trained().items():
        name, *changes = key.split("/")
        kind = changes[-1] if changes and changes[-1] != "mlm" else config_class(name)().to_dict()["position"]["type"]
        learned = DENSE.get(found.get("objective", ""), "")
        dense = trained().get(f"{learned}/{kind}", trained().get(learned, {}))
        losses = found.get("losses", [])
        row = {
            "variant": name,
            "kind": {"clm": "decoders", "mlm": "encoders"}.get(found.get("objective", ""), "not trained"),
            "position": kind,
            "loss": _mean(losses),
            "spread": max(losses) - min(losses) if len(losses) > 1 else None,
            "seeds": len(losses) or None,
            "dense loss": _mean(dense.get("losses")),
            "token frequencies": found.get("baseline"),
            "accuracy": _mean(found.get("accuracies")),
            "dense accuracy": _mean(dense.get("accuracies")),
            "residual paths": found.get("residual"),
            "why no map": found.get("no map"),
        }
        rows.append({column: value for column, value in row.items() if value is not None})
    return sorted(rows, key=lambda row: (row["kind"], row.get("loss", math.inf), row["variant"]))


def _mean(figures: list[float] | None) -> float | None:
    return statistics.fmean(figures) if figures else None


def of_run(found: dict[str, Any]) -> str:
    """What the picture of a trained model shows."""
    cut = ", ".join(f"`{field}={_said(value)}`" for field, value in found["cut"].items())
    kind = "a causal decoder" if found["objective"] == "clm" else "an encoder"
    return (
        f"The last layer of {kind} of two layers, trained for {found['steps']} steps on the documentation of Python's"
        f" standard library{f', with {cut}' if cut else ''}, on {LENGTH} tokens of held-out text; mean over heads."
        f" Held-out loss {found['losses'][0]:.2f} nats per token, by token frequencies alone {found['baseline']:.2f}."
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
