# SPDX-License-Identifier: Apache-2.0
"""Adaptively sparse attention: alpha-entmax in the softmax's place, with an alpha that each head learns."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..core.visibility import last_key, visible_block, visible_pairs
from ..ops.common.products import wide_products, widened
from ..ops.entmax import entmax, entmax_reference
from ..ops.entmax_attention import entmax_attention, worth_tiles
from ..ops.score_terms.attention import applies
from .shared.base import Attention
from .shared.query_blocks import SCORES_AT_ONCE, over_query_blocks, shared_rows
from .shared.spec import AttentionSpec

# The normalizer and its gradient have about this many numbers for each score at once; a block has as many rows fewer,
# but so many at least that reading all keys is shared by them.
_NUMBERS_PER_SCORE, _LEAST_ROWS = 4, 16


class AdaptivelySparseAttention(Attention):
    """o_i = sum_j p_ij v_j, p_i = alpha-entmax_j(scale * q_i k_j + b_ij), alpha = 1 + sigmoid(a) for each head.

    Correia, Niculae and Martins 2019 (arXiv 1909.00015), section 3 and eq. 11; a ~ N(0, 1) at the start, one for each
    layer, head and type of attention. alpha-entmax ([`entmax`](../ops/entmax.py)) is softmax for alpha = 1 and
    sparsemax for 2; in between, weights of low scores are zero, and more of them the larger alpha is. alpha is kept
    at `alpha_min` at least, as its derivative is 0 / 0 at 1.

    Time O(T S d), as softmax attention, and the normaliser's: two to eight evaluations of a power for each score, and
    on other devices than a processor a sort of each query's scores for alpha = 1.5 and 2. Memory: the scores of one
    block of queries, O(S), also in training; O(H T S) on the literal path, which bisects for the threshold. State:
    keys and values of all tokens seen. Dropout drops weights, whose rest is scaled up.
    """

    spec: AdaptivelySparseSpec
    undecayed = ("shape",)

    def __init__(self, config, spec: AdaptivelySparseSpec, **where):
        super().__init__(config, spec, **where)
        self.shape: nn.Parameter | None = None
        if spec.alpha is None:
            self.shape = nn.Parameter(torch.empty(1 if spec.share_alpha else self.num_heads))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.shape is not None:
            init.normal_(self.shape, mean=0.0, std=1.0)

    @property
    def alpha(self) -> Tensor | float:
        """A number, or [H or 1, 1, 1] in float32 at least."""
        if self.shape is None:
            return float(self.spec.alpha)  # type: ignore[arg-type]
        wide = self.shape.to(torch.promote_types(self.shape.dtype, torch.float32))
        return (1 + torch.sigmoid(wide)).clamp(min=self.spec.alpha_min)[:, None, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        key, value = self.repeated(key), self.repeated(value)
        length, keys = query.shape[2], key.shape[2]
        if self.wants_weights(context):
            scores = self._scores(query, key, context, slice(0, length))
            weights = entmax_reference(scores, self.alpha, visible_pairs(context, self.cross)).to(query.dtype)
            return torch.matmul(self._dropped(weights), value).transpose(1, 2), weights
        if worth_tiles(length, keys) and self._is_fused(query, context):
            return self._fused(query, key, value, context), None
        scores = query.shape[0] * self.num_heads * keys
        rows = max(SCORES_AT_ONCE // max(_NUMBERS_PER_SCORE * scores, 1), _LEAST_ROWS)
        whole = [shared_rows(x, length, rows) for x in (key, value)]

        def block(begin: int, end: int, part: Tensor) -> Tensor:
            stop, rows = last_key(context, self.cross, keys, end), slice(begin, end)
            near_key, near_value = (x.take(0, stop) for x in whole)
            scores = self._scores(part, near_key, context, rows)
            weights = entmax(scores, self.alpha, visible_block(context, self.cross, rows, slice(0, stop)))
            return torch.matmul(self._dropped(weights.to(query.dtype)), near_value).transpose(1, 2)

        return over_query_blocks(block, length, rows, (query, 2)), None

    def _is_fused(self, query: Tensor, context: Call) -> bool:
        (wide,) = widened(query[:0])
        return self.spec.alpha != 1 and self.score_bias(context) is None and applies(wide, self.dropout_now)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> Tensor:
        keys, alpha = key.shape[2], self.alpha
        wide_query, wide_key, wide_value = widened(query * self.scaling, key, value)
        return entmax_attention(
            wide_query,
            wide_key,
            wide_value,
            alpha.flatten() if isinstance(alpha, Tensor) else alpha,
            partial(visible_block, context, self.cross),
            partial(last_key, context, self.cross, keys),
        ).to(value.dtype)

    def _scores(self, query: Tensor, key: Tensor, context: Call, rows: slice) -> Tensor:
        """[B, H, t, s] for the queries `rows` and the first s keys."""
        scores = wide_products(query, key) * self.scaling
        bias = self.score_bias(context)
        if bias is None:
            return scores
        return scores + bias.block(context.query_index[rows], context.key_index[: key.shape[2]])

    def _dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.dropout) if self.training and self.dropout else weights


@register("attention", "adaptively_sparse", aliases=("entmax",))
class AdaptivelySparseSpec(AttentionSpec):
    """alpha: 1 (softmax) to 2 (sparsemax), of all heads (None: learned). alpha_min: bound on a learned alpha.
    share_alpha: one learned alpha for all heads of a layer."""

    summary = "alpha-entmax instead of softmax: weights that are zero, as many as each head learns to want"
    cross = True
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})
    head_options = frozenset({"norm"})
    keeps_keys_alone = True

    alpha: float | int | None = bounded(None, least=1, most=2)
    alpha_min: float = 1.01
    share_alpha: bool = False

    def check_fields(self) -> None:
        if not 1.001 <= self.alpha_min <= 2:
            raise ValueError(
                f"adaptively_sparse needs `alpha_min` from 1.001 to 2, got {self.alpha_min}; an alpha of 1 has no"
                " derivative, and can be had as `alpha=1`."
            )
        if self.share_alpha and self.alpha is not None:
            raise ValueError("adaptively_sparse with a given `alpha` learns none to share; leave `share_alpha` out.")

    def build(self, config, **where) -> AdaptivelySparseAttention:
        return AdaptivelySparseAttention(config, self, **where)
