"""What goes to the Hub beside the weights: model cards."""

from __future__ import annotations

from .model_card import variant_card, write_cards

__all__ = ["variant_card", "write_cards"]
