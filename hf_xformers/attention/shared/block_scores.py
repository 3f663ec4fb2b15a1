# SPDX-License-Identifier: Apache-2.0
"""Attention whose scores are made by the mechanism itself, for a block of queries at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.call import Call
from ...core.visibility import last_key, rows_can_be_empty, visible_block
from ...ops.common.shifted_rows import SharedRows
from .base import Attention
from .query_blocks import over_query_blocks, rows_at_once, shared_rows, visible_softmax


class ScoreBlock(NamedTuple):
    """Which scores are asked for: of the queries `rows`, the keys `keys` and the heads `heads` of a call. tables: what
    [`BlockScoresAttention.tables`] names, to take rows of."""

    context: Call
    rows: slice
    keys: slice
    heads: slice
    tables: tuple[SharedRows, ...]


class BlockScoresAttention(Attention):
    """o_i = sum_j softmax_j(s_ij + b_ij) v_j over all j that i may see, with scores s of the mechanism's own
    ([`BlockScoresAttention.scores`]) and the bias b of the config's position.

    Memory: the scores of one block of queries, O(S), also in training; O(H T S) on the literal path.
    """

    def tables(self) -> tuple[Tensor, ...]:
        """What has a gradient and every block of queries takes rows of once, [1, 1, n, w] each."""
        return ()

    def scores(self, query: Tensor, key: Tensor, block: ScoreBlock) -> Tensor:
        """query [B, h, t, d] and key [B, K, s, d] of the block -> its scores [B, h, t, s] in float32 at least, without
        bias and masks."""
        raise NotImplementedError

    def weights_of_block(self, query: Tensor, key: Tensor, context: Call, rows: slice, heads: slice) -> Tensor:
        keys = slice(0, last_key(context, self.cross, key.shape[2], rows.stop))
        tables = tuple(SharedRows(x, 1) for x in self.tables())
        return self._weights(query, key[:, :, keys], ScoreBlock(context, rows, keys, heads, tables))

    def _weights(self, query: Tensor, key: Tensor, block: ScoreBlock) -> Tensor:
        scores = self.scores(query, key, block)
        context, rows, keys, heads, _ = block
        bias = self.score_bias(context)
        if bias is not None:
            scores = scores + bias.block(context.query_index[rows], context.key_index[keys])[..., heads, :, :]
        mask = visible_block(context, self.cross, rows, keys)
        mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        return visible_softmax(scores, mask, rows_can_be_empty(context, self.cross))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        length, literal = query.shape[2], self.wants_weights(context)
        at_once = length if literal else rows_at_once(query.shape[0] * self.num_heads * key.shape[2])
        tables = tuple(shared_rows(x, length, at_once) for x in self.tables())

        def read(part: Tensor, near: Tensor, values: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            block = ScoreBlock(context, rows, slice(0, near.shape[2]), slice(None), tables)
            weights = self._weights(part, near, block).to(value.dtype)
            dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
            return torch.matmul(dropped, self.repeated(values)).transpose(1, 2), weights

        if literal:
            return read(query, key, value, slice(0, length))
        keys, values = (shared_rows(x, length, at_once) for x in (key, value))

        def block(begin: int, end: int, part: Tensor) -> Tensor:
            stop = last_key(context, self.cross, key.shape[2], end)
            return read(part, keys.take(0, stop), values.take(0, stop), slice(begin, end))[0]

        return over_query_blocks(block, length, at_once, (query, 2)), None
