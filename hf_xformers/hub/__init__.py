"""What goes to the Hub beside the weights: model cards, and the code of self-contained checkpoints."""

from __future__ import annotations

from .bundle import bundle
from .model_card import variant_card, write_cards
from .objective_card import objective_card, write_objective_cards

__all__ = ["bundle", "objective_card", "variant_card", "write_cards", "write_objective_cards"]
