"""Attention over patterns of positions, block by block."""
