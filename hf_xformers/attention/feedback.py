# SPDX-License-Identifier: Apache-2.0
"""Attention over the merged memories of earlier steps (the Feedback Transformer's mechanism)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer, SlotStateLayer
from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.initialization import start_projections
from ..core.prepared import State
from ..ops.common.products import wide_products
from ..ops.common.segments import accumulation_dtype
from .shared.base import Attention
from .shared.spec import AttentionSpec


class FeedbackMemory(State):
    """What the stack gives a layer. One step reads the older and the recent part of its window, [B, K, W - n, d] and
    [B, K, n, d]; a whole sequence at once reads the first two, [B, K, W + T - 1, d], which then hold all windows,
    overlapping."""

    keys: Tensor
    values: Tensor
    recent_keys: Tensor | None = None
    recent_values: Tensor | None = None


class FeedbackAttention(Attention):
    """o_t = sum_{s=1..W} softmax_s(scale * q_t (k_{t-s} + p_s)) v_{t-s} over the W steps before t, t itself not among
    them.

    Fan et al. 2020 (arXiv 2002.09402), section 3: k and v are projections of each step's merged memory, made by the
    'feedback' stack; p_s [d] is this layer's learned vector for distance s, the same for all heads. A step before the
    text, or one of padding, has k = v = 0 and keeps its share of the softmax, as in the authors' code: it is an empty
    memory, not a masked one, so that a text begins the same with padding before it and without.
    """

    spec: FeedbackAttentionSpec

    def __init__(self, config, spec: FeedbackAttentionSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        del self.k_proj, self.v_proj  # they stand on the stack
        self.window = spec.window
        self.key_positions = nn.Parameter(torch.empty(spec.window, self.head_dim))  # row r: distance window - r

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(), output=self.o_proj)
        self.start_queries(config, init)
        init.normal_(self.key_positions, mean=0.0, std=config.initializer_range)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D], with a [`FeedbackMemory`] of the only step (T = 1), or of T steps."""
        batch, length = hidden_states.shape[:2]
        read = context.given(FeedbackMemory)
        query = self.heads(self.q_proj(hidden_states))  # a group of heads reads one key head
        query = query.reshape(batch, self.num_key_value_heads, self.num_key_value_groups, length, self.head_dim)
        if read.recent_keys is not None and read.recent_values is not None:
            parts = (read.keys, read.values, read.recent_keys, read.recent_values)
            output, weights = self.read_step(query.squeeze(3), *parts), None
        else:
            output, weights = self.read_all(query, read.keys, read.values)
            output = output.flatten(1, 2).transpose(1, 2)
            weights = self.by_key(weights.flatten(1, 2), context) if context.output_attentions else None
        return SublayerOutput(self.o_proj(output.reshape(batch, length, -1)), weights)

    def read_step(
        self, query: Tensor, keys: Tensor, values: Tensor, recent_keys: Tensor, recent_values: Tensor
    ) -> Tensor:
        """query [B, K, G, d] -> [B, K, G, d]."""
        scores = torch.cat([wide_products(query, keys), wide_products(query, recent_keys)], dim=-1)
        weights = self.distribute(scores + wide_products(query, self.key_positions)).to(values.dtype)
        older = keys.shape[-2]
        return weights[..., :older] @ values + weights[..., older:] @ recent_values

    def read_all(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """query [B, K, G, T, d] -> output [B, K, G, T, d] and weights [B, K, G, T, W]."""
        keys, values = (tensor.unfold(2, self.window, 1) for tensor in (keys, values))  # [B, K, T, d, W], not copied
        with torch.autocast(query.device.type, enabled=False):
            wide = accumulation_dtype(query.dtype)
            scores = torch.einsum("bkgtd,bktdw->bkgtw", query.to(wide), keys.to(wide))
        weights = self.distribute(scores + wide_products(query, self.key_positions)).to(values.dtype)
        return torch.einsum("bkgtw,bktdw->bkgtd", weights, values), weights

    def distribute(self, scores: Tensor) -> Tensor:
        """softmax(scale * scores) over the window, with dropout in training."""
        weights = torch.softmax(scores * self.scaling, dim=-1)
        return nn.functional.dropout(weights, self.dropout, self.training)

    def by_key(self, weights: Tensor, context: Call) -> Tensor:
        """Weights by place in the window [B, H, T, W] -> by key [B, H, T, S]; what empty memories get is left out."""
        distance = context.query_index[:, None] - context.key_index[None, :]
        place = (self.window - distance).clamp(0, self.window - 1)
        read = (distance >= 1) & (distance <= self.window)
        if context.padding_mask is not None:
            read = read & context.padding_mask[:, None, None, :]
        found = weights.gather(-1, place.expand(*weights.shape[:2], -1, -1))
        return torch.where(read, found, torch.zeros((), dtype=found.dtype, device=found.device))


@register("attention", "feedback")
class FeedbackAttentionSpec(AttentionSpec):
    """window: how many earlier steps are read and kept."""

    summary = "reads what all layers together made of earlier steps"
    bidirectional = False
    acts = frozenset()
    reads = frozenset({HandOver.FEEDBACK})
    knows_order = True

    window: int = bounded(512, least=1)

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        """The window's keys and values [B, 1 or layers, K, W, d] stand in the first slot; the others only count."""
        return SlotStateLayer()

    def weighs(self, config) -> bool:
        return False

    def build(self, config, **where) -> FeedbackAttention:
        return FeedbackAttention(config, self, **where)
