"""What goes to the Hub beside the weights: model cards, and the code of self-contained checkpoints."""

from __future__ import annotations

from .bundle import bundle
from .model_card import variant_card, write_cards

__all__ = ["bundle", "variant_card", "write_cards"]
