"""Slot `block`: how sublayers are arranged in a layer."""
