# SPDX-License-Identifier: Apache-2.0
"""RealFormer: attention scores with a residual path from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import register
from ..core.prepared import Carry, one_state
from ..core.visibility import visible_pairs
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import FULL
from ..ops.common.products import wide_products
from .shared.score_chain import Link, ScoreChain
from .shared.spec import AttentionSpec


class RealFormerAttention(ScoreChain):
    """Z^l = q^l (k^l)^T / sqrt(d) + Z^(l-1), Z^(-1) = 0; o = softmax(Z^l) v, with mean: softmax(Z^l / (l + 1)) v.

    He, Ravula, Kanagal and Ainslie 2020 (arXiv 2012.11747), section 3; the mean is an option of the released code,
    advised there for 30 layers and more.

    The sum of products is a product of joined projections, Z^l = [q^0 .. q^l] [k^0 .. k^l]^T / sqrt(d). So the layers
    pass on either the scores, [B, H, T, S], or all projections so far, [B, H, T, l d] and [B, K, S, l d], whichever
    takes less memory at these lengths: scores up to T = S = (layers + 1) d and for single tokens, projections beyond,
    where no T x S tensor exists. Time: with scores that of vanilla attention and one addition; with projections the
    products Q K^T cost l + 1 times as much.

    Raises:
        ValueError: a layer's scores do not fit to those passed on (other numbers of heads, or another length).
    """

    spec: RealFormerSpec
    chain_name = "realformer"

    joins_projections = True

    def __init__(self, config, spec: RealFormerSpec, **where):
        super().__init__(config, spec, **where)
        self.joined_width = self.head_dim * (config.num_hidden_layers + 1)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        if not self.cross and self._hands_on_scores(context, context.query_index.shape[0], context.key_index.shape[0]):
            visible_pairs(context)

    def _hands_on_scores(self, context: Call, queries: int, keys: int) -> bool:
        if self.wants_weights(context) or context.static or context.explicit_mask is not None:
            return True
        return 2 * queries * keys <= (queries + keys) * self.joined_width

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        if self.cross:
            query, key, value = self.project_cross(hidden_states, memory, past_key_values, step)
        else:
            query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        query, below, weights = query * self.scaling, self.handed(context), None
        depth = None
        if self.spec.mean:
            depth = query.new_ones(1) if below.depth is None else below.depth + 1
        by_scores = self._hands_on_scores(context, query.shape[2], key.shape[2])
        if below.scores is not None or (below.queries is None and by_scores):  # later layers follow the first one
            output, weights, link = self._by_scores(query, key, value, depth, below, context)
        else:
            output, link = self._by_projections(query, key, value, depth, below, context)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(
            output, weights if self.wants_weights(context) else None, states=one_state(link, self.slot)
        )

    def _by_scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        depth: Tensor | None,
        below: Link,
        context: Call,
    ) -> tuple[Tensor, Tensor, Link]:
        """query (scaled) [B, H, T, d], key and value [B, K, S, d] -> output [B, T, H, d], weights [B, H, T, S]."""
        key, value = self.repeated(key), self.repeated(value)
        scores = wide_products(query, key)  # sums over many layers are too coarse in half precision
        if below.scores is not None:
            self.check_fit("scores", below.scores.shape, scores.shape)
            scores = scores + below.scores
        link = Link(scores=scores, depth=depth)
        if depth is not None:
            scores = scores / depth  # a new tensor: what is passed on stays the sum
        return *self.weigh(scores, value, context)[:2], link

    def _by_projections(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        depth: Tensor | None,
        below: Link,
        context: Call,
    ) -> tuple[Tensor, Link]:
        """The same output from joined projections, without a T x S tensor."""
        if below.queries is not None and below.keys is not None:
            self.check_fit("queries", below.queries.shape[:3], query.shape[:3])
            self.check_fit("keys", below.keys.shape[:3], key.shape[:3])
            query, key = torch.cat((below.queries, query), dim=-1), torch.cat((below.keys, key), dim=-1)
        link = Link(queries=query, keys=key, depth=depth)
        bias = self.score_bias(context)
        output: Any = block_sparse_attention(
            query if depth is None else query / depth,
            key,
            value,
            FULL,
            key_padding_mask=context.memory_padding_mask if self.cross else context.padding_mask,
            query_offset=0 if self.cross else key.shape[2] - query.shape[2],
            causal=self.is_causal,
            scale=1.0,
            dropout=self.dropout_now,
            score_bias=None if bias is None else bias.block,
            segment_ids=None if self.cross else context.segment_ids,
        )
        return output.transpose(1, 2), link


@register("attention", "realformer", aliases=("residual_scores",))
class RealFormerSpec(AttentionSpec):
    """mean: divide the running sum by the number of layers so far (for deep models)."""

    summary = "scores add up from layer to layer"
    head_options = frozenset({"norm"})
    splits = frozenset({"heads"})
    cross = True
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})

    mean: bool = False

    def carries(self, config) -> Carry:
        return Carry(Link, (config.num_attention_heads, self.mean), handed_on=True)

    def build(self, config, **where) -> RealFormerAttention:
        return RealFormerAttention(config, self, **where)
