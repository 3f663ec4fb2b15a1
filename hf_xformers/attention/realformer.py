# SPDX-License-Identifier: Apache-2.0
"""RealFormer: attention scores with a residual path from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.components import register
from ..core.context import LayerContext, SublayerOutput
from ..core.visibility import visible_pairs
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import full
from ..ops.common.products import wide_products
from .shared.base import AttentionSpec
from .shared.score_chain import ScoreChain

_ALL = full()


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

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        if not self.cross and self._hands_on_scores(context, context.query_index.shape[0], context.key_index.shape[0]):
            visible_pairs(context)

    def _hands_on_scores(self, context: LayerContext, queries: int, keys: int) -> bool:
        if self.wants_weights(context) or context.static or context.explicit_mask is not None:
            return True
        return 2 * queries * keys <= (queries + keys) * self.joined_width

    def forward(
        self,
        hidden_states: Tensor,
        context: LayerContext,
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
        query, streams, weights = query * self.scaling, {}, None
        depth = None
        if self.spec.mean:
            before = self.handed("depth", context)
            depth = query.new_ones(1) if before is None else before + 1
            streams[f"{self.chain}_depth"] = depth
        scores, projected = (self.handed(name, context) for name in ("scores", "queries"))
        by_scores = self._hands_on_scores(context, query.shape[2], key.shape[2])
        if scores is not None or (projected is None and by_scores):  # later layers follow the first one
            output, weights = self._by_scores(query, key, value, depth, context, streams)
        else:
            output = self._by_projections(query, key, value, depth, context, streams)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights if self.wants_weights(context) else None, streams=streams)

    def _by_scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        depth: Tensor | None,
        context: LayerContext,
        streams: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """query (scaled) [B, H, T, d], key and value [B, K, S, d] -> output [B, T, H, d], weights [B, H, T, S]."""
        key, value = self.repeated(key), self.repeated(value)
        scores = wide_products(query, key)  # sums over many layers are too coarse in half precision
        handed = self.handed("scores", context)
        if handed is not None:
            self.check_fit("scores", handed.shape, scores.shape)
            scores = scores + handed
        streams[f"{self.chain}_scores"] = scores
        if depth is not None:
            scores = scores / depth  # a new tensor: what is passed on stays the sum
        return self.weigh(scores, value, context)[:2]

    def _by_projections(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        depth: Tensor | None,
        context: LayerContext,
        streams: dict[str, Tensor],
    ) -> Tensor:
        """The same output from joined projections, without a T x S tensor."""
        for name, own in (("queries", query), ("keys", key)):
            handed = self.handed(name, context)
            if handed is not None:
                self.check_fit(name, handed.shape[:3], own.shape[:3])
                own = torch.cat((handed, own), dim=-1)
            streams[f"{self.chain}_{name}"] = own
        query, key = streams[f"{self.chain}_queries"], streams[f"{self.chain}_keys"]
        bias = self.score_bias(context)
        output: Any = block_sparse_attention(
            query if depth is None else query / depth,
            key,
            value,
            _ALL,
            key_padding_mask=context.memory_padding_mask if self.cross else context.padding_mask,
            query_offset=0 if self.cross else key.shape[2] - query.shape[2],
            causal=self.is_causal,
            scale=1.0,
            dropout=self.dropout if self.training else 0.0,
            score_bias=None if bias is None else bias.block,
            segment_ids=None if self.cross else context.segment_ids,
        )
        return output.transpose(1, 2)


@register("attention", "realformer", aliases=("residual_scores",))
class RealFormerSpec(AttentionSpec):
    """mean: divide the running sum by the number of layers so far (for deep models)."""

    summary = "scores add up from layer to layer"
    normalizes_heads = True
    splits_heads = True
    cross = True
    score_bias = True
    explicit_mask = True
    packed = True

    mean: bool = False

    def shared_sizes(self, config) -> tuple:
        return (config.num_attention_heads, self.mean)

    def hands_on(self, config) -> bool:
        return True

    def build(self, config, **where) -> RealFormerAttention:
        return RealFormerAttention(config, self, **where)
