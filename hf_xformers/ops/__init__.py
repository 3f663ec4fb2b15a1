"""Parameter-free engines, a folder each: `attention.py` is the door, `reference.py` the equation, the rest private to
it."""
