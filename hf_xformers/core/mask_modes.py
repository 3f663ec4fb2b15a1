# SPDX-License-Identifier: Apache-2.0
"""What the input `mask_modes` [B, 2] of stack 'mask_modes' holds: a mode, and the length of a first text."""

MODES = "mask_modes"
# A token sees all tokens, those up to itself, those from itself on; or it is of a source, which sees itself alone, or
# of a target, which sees the source and what is written so far.
BIDIRECTIONAL, LEFT_TO_RIGHT, RIGHT_TO_LEFT, SEQ2SEQ = range(4)
# Token types of a first and a second text by mode, where each mode has its own; and how many there are.
TYPES = {BIDIRECTIONAL: (0, 1), LEFT_TO_RIGHT: (2, 2), RIGHT_TO_LEFT: (3, 3), SEQ2SEQ: (4, 5)}
ALL_TYPES = 6


def target_types(type_vocab_size: int) -> tuple[int, int]:
    """The token types of source and target in a model with so many."""
    return TYPES[SEQ2SEQ] if type_vocab_size >= ALL_TYPES else TYPES[BIDIRECTIONAL]
