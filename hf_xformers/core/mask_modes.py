"""What the input `mask_modes` [B, 2] of stack 'mask_modes' holds: a mode, and the length of a first text."""

MODES = "mask_modes"
# A token sees all tokens, those up to itself, those from itself on; or it is of a source, which sees itself alone, or
# of a target, which sees the source and what is written so far.
BIDIRECTIONAL, LEFT_TO_RIGHT, RIGHT_TO_LEFT, SEQ2SEQ = range(4)

__all__ = ["BIDIRECTIONAL", "LEFT_TO_RIGHT", "MODES", "RIGHT_TO_LEFT", "SEQ2SEQ"]
