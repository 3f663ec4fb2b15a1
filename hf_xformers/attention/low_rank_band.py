# SPDX-License-Identifier: Apache-2.0
"""Low-rank and band attention: narrow queries and keys for what is far, a band for what is near."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..core.visibility import mask_of_call, rows_can_be_empty, visible_pairs
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.fused import fused_attention
from .shared.base import cross_cache, given_memory, literal_softmax_attention
from .shared.block_sparse import BlockSparseAttention
from .shared.spec import AttentionSpec


class LowRankBandAttention(BlockSparseAttention):
    """o = A_low V_low + A_band V: A_low = softmax(Q_r K_r^T / sqrt(r)) over all tokens, with queries and keys of width
    r, and A_band = softmax(scale * Q K^T) over the tokens at most `band_width` away.

    Guo, Qiu, Xue and Zhang 2019 (IEEE/ACM TASLP 27, 10.1109/TASLP.2019.2944078), as section 4.4.1 of the survey gives
    it: a module of low rank for the whole text and a band for what stands near, as attention matrices that were
    trained have both. Each has values of its own. A decoder reads earlier tokens alone in both. As cross-attention it
    is the first module alone.

    Time O(T^2 (r + d)) in the one, which stays quadratic, and O(T w d) in the other; memory O(T D), as scores of low
    rank are made by the fused kernels. State: keys [r + d] and values [2 d] of each head. The weights given out are
    the mean of both, or their sum by the gate.
    """

    spec: LowRankBandSpec

    def __init__(self, config, spec: LowRankBandSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        width, bias = config.hidden_size, spec.bias
        self.rank = spec.rank(config)
        self.low_scaling = self.rank**-0.5
        self.low_q_proj = nn.Linear(width, self.num_heads * self.rank, bias=bias)
        self.low_k_proj = nn.Linear(width, self.num_key_value_heads * self.rank, bias=bias)
        self.low_v_proj = nn.Linear(width, self.num_key_value_heads * self.head_dim, bias=bias)
        self.gate = nn.Parameter(torch.empty(self.num_heads)) if spec.combine == "gate" and not cross else None
        if cross:
            del self.q_proj, self.k_proj, self.v_proj
        elif spec.combine == "concat":
            self.o_proj = nn.Linear(2 * self.num_heads * self.head_dim, width, bias=spec.has_output_bias)

    def initialize(self, config, init) -> None:
        if not self.cross:
            super().initialize(config, init)
        inputs = (self.low_q_proj, self.low_k_proj, self.low_v_proj)
        start_projections(config, init, inputs=inputs, output=self.o_proj)
        if config.initializer == "t5":  # as in all attention the query carries the root of the width
            std = config.initializer_factor * (config.hidden_size * self.rank) ** -0.5
            init.normal_(self.low_q_proj.weight, mean=0.0, std=std)
        if self.gate is not None:
            init.zeros_(self.gate)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        if self.cross:
            return
        super().prepare(context, past_key_values)
        mask_of_call(context)

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
        narrow = self._narrow(self.low_q_proj, hidden_states)
        if self.cross:
            key, value = self._of_memory(memory, context, past_key_values, step)
            output, weights = self._low_rank(narrow, key, value, context)
            return SublayerOutput(self.o_proj(output.flatten(2)), weights)
        query, rank = self.heads(self.q_proj(hidden_states)), self.rank
        keys = [self._narrow(self.low_k_proj, hidden_states), self.heads(self.k_proj(hidden_states))]
        values = [self.heads(projection(hidden_states)) for projection in (self.low_v_proj, self.v_proj)]
        cache = self_attention_cache(past_key_values)
        if cache is not None:  # both side by side
            kept = appended(cache, torch.cat(keys, -1), torch.cat(values, -1), step)
            keys, values = (list(x.split([first, self.head_dim], -1)) for x, first in zip(kept, (rank, self.head_dim)))
        far, far_weights = self._low_rank(narrow, keys[0], values[0], context)
        near, near_weights = self.attend(query, keys[1], values[1], context)
        weights = None
        if far_weights is not None and near_weights is not None:
            share = 0.5 if self.gate is None else torch.sigmoid(self.gate)[:, None, None]
            weights = share * far_weights + (1 - share) * near_weights
        return SublayerOutput(self.o_proj(self._combined(far, near).flatten(2)), weights)

    def _combined(self, far: Tensor, near: Tensor) -> Tensor:
        """[B, T, H, d] of both."""
        if self.gate is not None:
            share = torch.sigmoid(self.gate)[:, None]
            return share * far + (1 - share) * near
        if self.spec.combine == "concat":
            return torch.cat([far, near], dim=2)
        return (far + near) * 0.5 if self.spec.combine == "mean" else far + near

    def _narrow(self, projection: nn.Linear, states: Tensor) -> Tensor:
        """[B, T, D] -> [B, heads, T, r]."""
        return projection(states).unflatten(-1, (-1, self.rank)).transpose(1, 2)

    def _of_memory(self, memory: Tensor | None, context: Call, past: Cache | None, step: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory, computed once per generated text."""
        cache = cross_cache(past)
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            return layer.keys, layer.values
        memory = given_memory(memory)
        key, value = self._narrow(self.low_k_proj, memory), self.heads(self.low_v_proj(memory))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, step)
            cache.is_updated[step] = True
        return key, value

    def _low_rank(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """query [B, H, T, r], key [B, K, S, r], value [B, K, S, d] -> [B, T, H, d] and the weights."""
        dropout = self.dropout_now
        if self.wants_weights(context):
            pairs = visible_pairs(context, self.cross)
            return literal_softmax_attention(query, key, value, pairs, None, self.low_scaling, dropout)
        if self.cross:
            padding = context.memory_padding_mask
            mask = None if padding is None else padding[:, None, None, :]
        else:
            mask = mask_of_call(context)
        empty = None
        if mask is not None and rows_can_be_empty(context, self.cross):
            empty = ~mask.any(-1, keepdim=True)
            mask = mask | empty
        missing = value.shape[-1] - query.shape[-1]  # the fused kernels have one width for all three
        output = fused_attention(
            *(F.pad(query, (0, missing)), F.pad(key, (0, missing)), value, mask),
            dropout_p=dropout,
            is_causal=self.is_causal and mask is None and context.fresh,
            scale=self.low_scaling,
            enable_gqa=self.num_key_value_groups > 1,
        )
        output = output if empty is None else output.masked_fill(empty, 0.0)
        return output.transpose(1, 2), None


@register("attention", "low_rank_band")
class LowRankBandSpec(AttentionSpec):
    """low_rank: width r of the queries and keys that read the whole text (`None`: 16,
    or the width of a head where that is less). band_width: tokens on each side of a token
    that the band has, in a decoder before it. combine: whether both results are added (`sum`: weights of 2 in all),
    their `mean`, mixed by a learned `gate` of each head, or put side by side before an output projection of twice
    the width (`concat`)."""

    summary = "narrow queries and keys for the whole text, and a band for its neighbourhood"
    cross = True
    acts = frozenset()

    low_rank: int | None = bounded(None, "rank", least=1)
    band_width: int = bounded(3, "window", least=0)
    combine: Literal["sum", "mean", "gate", "concat"] = "sum"

    def check(self, config) -> None:
        if self.low_rank is not None and self.low_rank > config.head_width:
            raise ValueError(
                f"low_rank_band needs a `low_rank` of at most the head width {config.head_width}, got {self.low_rank};"
                " a smaller number is the point of it."
            )

    def rank(self, config) -> int:
        """r of this model."""
        return min(16, config.head_width) if self.low_rank is None else self.low_rank

    def pattern(self, config, layer_idx: int) -> Pattern:
        return patterns.band(self.band_width, 0 if config.is_decoder else self.band_width)

    def build(self, config, **where) -> LowRankBandAttention:
        return LowRankBandAttention(config, self, **where)
