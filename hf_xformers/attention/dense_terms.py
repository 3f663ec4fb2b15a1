"""Dense attention with what a position adds inside it: score terms of queries and keys, or vectors on the heads."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from ..context import LayerContext, self_attention_cache
from ..ops.shifted_rows import SharedRows
from ..position.base import LayerTerms
from .dense import DenseAttention
from .term_blocks import VisibleTerms, attend_with_terms, weights_with_terms

# A stream with the states [B, T, D] that keys and values are made of where they are not the queries' own.
KEY_STATES = "key_states"


class PositionTerms(VisibleTerms):
    """What [`LayerTerms`] of a position add in one call."""

    def __init__(self, terms: LayerTerms, context: LayerContext, num_keys: int) -> None:
        super().__init__(context, num_keys)
        self.terms, self.has_values, self.separable = terms, terms.has_values, terms.separable

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.terms.by_query(query, tables, self.context)

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.terms.by_key(key, tables, self.context)

    def scores(
        self,
        query: Tensor,
        tables: tuple[Tensor, ...],
        by_query: tuple[Tensor, ...],
        by_key: tuple[SharedRows, ...],
        rows: slice,
        keys: int,
    ) -> Tensor:
        if self.separable:
            return super().scores(query, tables, by_query, by_key, rows, keys)
        return self.terms.scores(query, tables, by_query, by_key, rows, keys, self.context)

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        return self.terms.line(tables, self.context)

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice) -> Tensor:
        return self.terms.values(weights, tables, rows, self.context)


class DenseWithTerms(DenseAttention):
    """softmax_j(scale * q_i k_j + term_ij) v_j [+ term of the values], the terms as the config's position says.

    No fused kernel knows the derivative of such terms: they are made in blocks of queries and made again in the backward
    pass. Memory: the scores of a few blocks, O(S), also in training; O(H T S) on the literal path. Positions that only add
    to queries, keys and values leave the kernels of [`DenseAttention`] in place.
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
        if not self.position_terms.changes_scores:
            return super().attend(query, key, value, context)
        if self.num_key_value_groups > 1:
            key, value = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key, value))
        scale = self.scaling * self.position_terms.content_scale
        tables = self.position_terms.tables(self, scale, context)
        terms = PositionTerms(self.position_terms, context, key.shape[2])
        inputs = (query * scale, key, value, tables, terms, self.dropout if self.training else 0.0)
        if self.wants_weights(context):
            return weights_with_terms(*inputs)
        return attend_with_terms(*inputs), None
