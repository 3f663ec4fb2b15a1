# SPDX-License-Identifier: Apache-2.0
"""What goes to the Hub besides the weights: model cards, and the code of self-contained checkpoints."""

from __future__ import annotations

from .attention_map import attention_maps, draw
from .bundle import bundle
from .model_card import variant_card, write_cards
from .objective_card import objective_card, write_objective_cards

__all__ = [
    "attention_maps",
    "bundle",
    "draw",
    "objective_card",
    "variant_card",
    "write_cards",
    "write_objective_cards",
]
