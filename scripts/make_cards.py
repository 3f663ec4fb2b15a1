#!/usr/bin/env python
"""Writes the model card and attention map of every variant to `model_cards/`, with measured rows where there are any,
and the cards of objectives to `model_cards/objectives/`."""

from __future__ import annotations

from pathlib import Path

from hf_xformers.hub import write_cards, write_objective_cards

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    for path in write_cards(ROOT / "model_cards", ROOT / "benchmarks" / "results"):
        print(path.relative_to(ROOT))
    for path in write_objective_cards(ROOT / "model_cards" / "objectives"):
        print(path.relative_to(ROOT))
