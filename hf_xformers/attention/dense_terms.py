"""Dense attention with what a position adds inside it: score terms of queries and keys, or vectors on the heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..context import LayerContext, self_attention_cache
from .dense import DenseAttention
from .query_blocks import (
    last_key,
    over_query_blocks,
    plus_products,
    rows_at_once,
    rows_can_be_empty,
    shared_rows,
    visible_block,
    visible_softmax,
)

# A stream with the states [B, T, D] that keys and values are made of where they are not the queries' own.
KEY_STATES = "key_states"


class DenseWithTerms(DenseAttention):
    """softmax_j(scale * q_i k_j + term_ij) v_j [+ term of the values], the terms as the config's position says.

    No fused kernel knows such terms: scores are made in blocks of queries and made again in the backward pass. Memory: the
    scores of one block, O(S), also in training; O(H T S) on the literal path. Positions that only add to queries, keys and
    values leave the kernels of [`DenseAttention`] in place.
    """

    def __init__(self, config, spec, **where):
        super().__init__(config, spec, **where)
        self.position_terms = config.position.build_terms(config, layer_idx=self.layer_idx)

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        self.position_terms.prepare(context)
        if not self.position_terms.changes_scores:
            super().prepare(context, past_key_values)

    def project_self(
        self, hidden_states: Tensor, context: LayerContext, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        source = context.streams.get(KEY_STATES, hidden_states)
        query = self.heads(self.q_proj(hidden_states))
        key, value = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        query, key, value = self.position_terms.heads(query, key, value, context)
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            key, value = cache.update(key, value, step)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        terms = self.position_terms
        if not terms.changes_scores:
            return super().attend(query, key, value, context)
        if self.num_key_value_groups > 1:
            key, value = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key, value))
        scale = self.scaling * terms.content_scale
        query = query * scale
        tables = terms.tables(self, scale, context)
        by_key = terms.by_key(key, tables, context)
        if self.wants_weights(context):
            return self._block(query, key, value, tables, by_key, context, slice(0, query.shape[2]))

        rows = rows_at_once(query.shape[0] * self.num_heads * key.shape[2])
        whole = [shared_rows(x, query.shape[2], rows) for x in (key, value, *by_key)]

        def block(begin: int, end: int, part: Tensor) -> Tensor:
            stop = last_key(context, False, key.shape[2], end)
            near_key, near_value, *products = (x.take(0, stop) for x in whole)
            return self._block(part, near_key, near_value, tables, tuple(products), context, slice(begin, end))[0]

        return over_query_blocks(block, query.shape[2], rows, (query, 2)), None

    def _block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tables: tuple[Tensor, ...],
        by_key: tuple[Tensor, ...],
        context: LayerContext,
        rows: slice,
    ) -> tuple[Tensor, Tensor]:
        """The equation for the queries `rows` and the first s keys -> output [B, t, H, d], weights [B, H, t, s]."""
        scores = plus_products(self.position_terms.scores(query, key, tables, by_key, rows, context), query, key)
        mask = visible_block(context, False, rows, slice(0, key.shape[2]))
        weights = visible_softmax(scores, mask, rows_can_be_empty(context), overwrite=True).to(query.dtype)
        dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
        output = torch.matmul(dropped, value)
        added = self.position_terms.values(dropped, rows, context)
        if added is not None:
            output = output + added
        return output.transpose(1, 2), weights
