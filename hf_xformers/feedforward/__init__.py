"""Slot `feedforward` (survey 5.3): the position-wise sublayer."""
