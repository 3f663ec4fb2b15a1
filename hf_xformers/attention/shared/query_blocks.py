# SPDX-License-Identifier: Apache-2.0
"""What mechanisms with explicit scores share: softmax over what is visible, and a loop over blocks of queries.

A mechanism that changes scores in a way no fused kernel knows needs them written out. Block by block over the queries,
and computed again in the backward pass, they take memory in proportion to the number of keys and not to its square.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...ops.common.shifted_rows import SharedRows

# Scores (over batch and heads) in one block: 4 MiB in float32, large enough to hide the cost of a Python step.
SCORES_AT_ONCE = 1 << 20
# However large the batch is, a block has this many queries, so that the loop stays short.
LEAST_ROWS = 64
# What a block costs besides its scores (reading all keys, adding to all their gradients) is shared by its queries.
FAVOURED_ROWS = 256


def visible_softmax(scores: Tensor, mask: Tensor | None, can_be_empty: bool = True, overwrite: bool = False) -> Tensor:
    """Softmax over the last axis, where `mask` is True; computed in float32 for half precision.

    scores [B, H, T, S], mask broadcastable to it. A row that sees nothing gives zeros, in the gradient as well;
    `can_be_empty=False` says that there is none. `overwrite=True`: the scores are nobody else's, and what made them
    does not need them for its gradient.
    """
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        if overwrite and not torch.compiler.is_compiling():
            with torch.no_grad():  # what gets no weight has no gradient, so the step need not be differentiated
                scores.masked_fill_(~mask, lowest)
        else:
            scores = scores.masked_fill(~mask, lowest)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if mask is not None and can_be_empty:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return weights


def rows_at_once(scores_per_row: int) -> int:
    """Queries in a block, for so many scores (over batch, heads and keys) of one query."""
    return max(SCORES_AT_ONCE // max(scores_per_row, 1), LEAST_ROWS)


def heads_at_once(batch: int, heads: int, keys: int) -> int:
    """How many of `heads` independent heads to take together, so that a block has `FAVOURED_ROWS` queries."""
    return max(1, min(heads, SCORES_AT_ONCE // (batch * keys * FAVOURED_ROWS)))


def shared_rows(x: Tensor, length: int, rows: int) -> SharedRows:
    """Keys (or values, or what belongs to keys) [B, H, S, n] of which each block of `rows` of `length` queries takes
    some."""
    return SharedRows(x, -(-length // rows))


def over_query_blocks(
    block: Callable[..., Tensor], length: int, rows: int, *by_rows: tuple[Tensor | None, int]
) -> Tensor:
    """Joins `block(begin, end, *parts)`, [B, end - begin, ...], over blocks of `rows` queries to [B, length, ...].

    by_rows: (tensor, axis of its `length` queries); their parts of a block are handed to `block`. With more than one
    block, what a block computes is not kept for the backward pass but computed again.
    """
    if length <= rows:
        return block(0, length, *(x for x, _ in by_rows))
    starts = range(0, length, rows)
    # Split once: the gradients of so many slices would each be as large as the whole.
    split = [[None] * len(starts) if x is None else x.split(rows, axis) for x, axis in by_rows]
    pieces = []
    for number, begin in enumerate(starts):
        arguments = (begin, min(begin + rows, length), *(parts[number] for parts in split))
        if torch.is_grad_enabled():
            pieces.append(checkpoint(block, *arguments, use_reentrant=False))
        else:
            pieces.append(block(*arguments))
    return torch.cat(pieces, dim=1)
