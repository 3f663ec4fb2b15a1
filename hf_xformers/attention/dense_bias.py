"""Dense attention with a score bias, which a long text gets block by block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..context import LayerContext
from ..ops.shifted_rows import shift_rows
from .dense import DenseAttention
from .query_blocks import (
    heads_at_once,
    last_key,
    over_query_blocks,
    plus_products,
    rows_at_once,
    rows_can_be_empty,
    shared_rows,
    visible_block,
    visible_softmax,
)

# Numbers (over heads) of a bias that is made as a whole, for all layers and rows of a batch: 32 MiB in float32.
BIAS_AT_ONCE = 1 << 23


class DenseWithBias(DenseAttention):
    """softmax_j(scale * q_i k_j + b_ij) v_j with the bias b of the config's position.

    A short text has its bias [H, T, S] made once, for the fused kernels. A long one has it made for a block of queries at a
    time, in every layer and again in the backward pass: O(T + S) memory, also in training.
    """

    def _in_blocks(self, context: LayerContext) -> bool:
        pairs = context.query_index.shape[0] * context.key_index.shape[0]
        usual = context.implementation == "sdpa" and not self.wants_weights(context)
        return (
            usual
            and not context.static
            and not torch.compiler.is_compiling()
            and self.num_heads * pairs > BIAS_AT_ONCE
        )

    def prepare_bias(self, context: LayerContext) -> None:
        if not self._in_blocks(context):
            super().prepare_bias(context)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        if "dense_bias" in context.streams or not self._in_blocks(context):
            return super().attend(query, key, value, context)
        if self.num_key_value_groups > 1:
            key, value = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key, value))
        by_distance = hasattr(context.shared["score_bias"], "by_distance")
        several = heads_at_once(query.shape[0], self.num_heads, key.shape[2]) if by_distance else self.num_heads
        parts = zip(*(x.split(several, dim=1) for x in (query * self.scaling, key, value)), strict=True)
        outputs = [self._some_heads(*part, number * several, context) for number, part in enumerate(parts)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), None

    def _some_heads(self, query: Tensor, key: Tensor, value: Tensor, first: int, context: LayerContext) -> Tensor:
        """Heads from number `first` on, [B, h, T or S, d] -> [B, T, h, d]."""
        length, heads = query.shape[2], slice(first, first + query.shape[1])
        rows = rows_at_once(query.shape[0] * query.shape[1] * key.shape[2])
        whole = [shared_rows(x, length, rows) for x in (key, value)]

        def block(begin: int, end: int, part: Tensor) -> Tensor:
            stop = last_key(context, False, key.shape[2], end)
            near_key, near_value = (x.take(0, stop) for x in whole)
            scores = plus_products(self._bias(slice(begin, end), stop, heads, context), part, near_key)
            mask = visible_block(context, False, slice(begin, end), slice(0, stop))
            weights = visible_softmax(scores, mask, rows_can_be_empty(context), overwrite=True).to(value.dtype)
            if self.training and self.dropout:
                weights = F.dropout(weights, self.dropout)
            return torch.matmul(weights, near_value).transpose(1, 2)

        return over_query_blocks(block, length, rows, (query, 2))

    def _bias(self, rows: slice, keys: int, heads: slice, context: LayerContext) -> Tensor:
        """b of the queries `rows` and the first keys, [1 or B, h, t, s]."""
        bias, queries = context.shared["score_bias"], context.query_index[rows]
        if not hasattr(bias, "by_distance"):
            matrix = bias.block(queries, context.key_index[:keys])
            return (matrix if matrix.ndim == 4 else matrix[None])[:, heads]
        # Slots follow each other: from the last query to the first key, and on.
        count = queries.shape[0]
        steps = torch.arange(count + keys - 1, device=queries.device) + (context.key_index[:1] - queries[-1:])
        line = bias.by_distance(steps)[heads]
        return shift_rows(line[None, :, None].expand(1, -1, count, -1), keys)


__all__ = ["DenseWithBias"]
