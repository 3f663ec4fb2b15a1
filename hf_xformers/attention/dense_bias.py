"""Dense attention with a score bias, which a long text gets block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.context import LayerContext
from ..ops.score_terms.attention import applies
from ..position.base import ScoreBias
from ..position.distances import distances_of_block
from .dense_attention import DenseAttention
from .shared.position_terms import BiasByDistance
from .shared.term_blocks import attend_with_terms

# Numbers (over heads) of a bias that is made as a whole, for all layers and rows of a batch: 32 MiB in float32.
BIAS_AT_ONCE = 1 << 23
# The same where the bias is trained on a processor in full precision: torch's kernels would write all scores out for
# its gradient, so that tiles pay from about 256 tokens on.
TRAINED_BIAS_AT_ONCE = 1 << 19


class DenseWithBias(DenseAttention):
    """softmax_j(scale * q_i k_j + b_ij) v_j with the bias b of the config's position.

    A short text has its bias [H, T, S] made once, for all layers. A long one whose bias is a number for each distance
    has it made for a block of queries at a time, in every layer and again in the backward pass: O(T + S) memory, also
    in training.
    """

    def _in_blocks(self, context: LayerContext) -> bool:
        pairs = context.query_index.shape[0] * context.key_index.shape[0]
        usual = context.implementation == "sdpa" and not self.wants_weights(context)
        bias = context.shared.get("score_bias")
        return (
            usual
            and not context.static
            and not torch.compiler.is_compiling()
            and self.num_heads * pairs >= self._bias_at_once
            and isinstance(bias, ScoreBias)
            and bias.relative
        )

    @property
    def _bias_at_once(self) -> int:
        tiles = torch.is_grad_enabled() and applies(self.q_proj.weight, self.dropout if self.training else 0.0)
        return TRAINED_BIAS_AT_ONCE if tiles else BIAS_AT_ONCE

    def prepare_bias(self, context: LayerContext) -> None:
        if not self._in_blocks(context):
            super().prepare_bias(context)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        if "dense_bias" in context.streams or not self._in_blocks(context):
            return super().attend(query, key, value, context)
        line = context.shared["score_bias"].by_distance(distances_of_block(context, slice(None), key.shape[2]))
        terms = BiasByDistance(context, key.shape[2])
        dropout = self.dropout if self.training else 0.0
        return attend_with_terms(
            query * self.scaling, self.repeated(key), self.repeated(value), (line.to(query.dtype),), terms, dropout
        ), None


__all__ = ["DenseWithBias"]
