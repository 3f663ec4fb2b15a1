"""Dense attention with what a position adds inside it."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from ..core.context import LayerContext
from .dense_attention import DenseAttention
from .shared.position_terms import WithPositionTerms
from .shared.term_blocks import attend_with_terms, weights_with_terms


class DenseWithTerms(WithPositionTerms, DenseAttention):
    """softmax_j(scale * q_i k_j + term_ij) v_j [+ term of the values], the terms as the config's position says.

    No fused kernel knows the derivative of such terms: they are made in blocks of queries and made again in the
    backward pass. Memory: the scores of a few blocks, O(S), also in training; O(H T S) on the literal path. Positions
    that only add to queries, keys and values leave the kernels of [`DenseAttention`] in place.
    """

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        if self.position_terms.changes_scores:
            self.position_terms.prepare(context)  # what plain attention prepares is not read
        else:
            super().prepare(context, past_key_values)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        added = self.score_terms(context)
        if added is None:
            return super().attend(query, key, value, context)
        dropout = self.dropout if self.training else 0.0
        inputs = (query * added.scale, self.repeated(key), self.repeated(value), added.tables, added.terms, dropout)
        if self.wants_weights(context):
            return weights_with_terms(*inputs)
        return attend_with_terms(*inputs), None
