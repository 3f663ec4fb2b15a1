# SPDX-License-Identifier: Apache-2.0
"""A sliding window, and the first tokens of a text, which stay in sight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.cache import FollowsRows, WindowLayer
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import Pattern, global_
from ..ops.common.real_tokens import real_first
from .shared.base import literal_softmax_attention
from .shared.block_sparse import FEW_QUERIES, BlockSparseAttention
from .shared.head_parts import Heads
from .shared.pattern_spec import BlockSparseSpec, window, window_cache
from .shared.window_parts import Beside, attend_to_window, form_of_window


class Sinks(NamedTuple):
    """The first real tokens of each row: keys and values [B, K, k, d], their slots [B, k], and whether there is one at
    all [B, k]."""

    key: Tensor
    value: Tensor
    slots: Tensor
    real: Tensor


class SinkWindowLayer(FollowsRows, WindowLayer):
    """The keys and values of a window, and those of the first tokens of each row. Its size does not grow."""

    is_croppable = False

    def __init__(self, sliding_window: int, **kwargs: Any):
        super().__init__(sliding_window, **kwargs)
        self.sinks: tuple[Tensor, Tensor] | None = None

    def reset(self) -> None:
        super().reset()
        self.sinks = None

    def _map(self, function) -> None:
        if self.sinks is not None:
            self.sinks = (function(self.sinks[0]), function(self.sinks[1]))


class SlidingWindowAttention(BlockSparseAttention):
    """o_i = sum over j in N(i) of softmax_{N(i)}(scale * q_i k_j) v_j, N(i) = {j : |i - j| <= w} and the first k real
    tokens; in a decoder {j : i - w < j <= i} and those of the k that are not later than i.

    The first tokens are "attention sinks" (Xiao et al. 2023, StreamingLLM, arXiv 2309.17453, section 3.2): softmax
    puts the weight there that it has no use for, and a model trained on all tokens breaks down where they fall out of
    its window. Positions stay those of the text, so that a cache gives what the whole text does (the authors count
    inside the cache). Time O(T (w + k)). State: keys and values of w tokens and of the k.
    """

    spec: SlidingWindowSpec

    joins_projections = True

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        if not self.spec.sinks:
            return super().forward(hidden_states, context, past_key_values=past_key_values, step=step)
        step = self.layer_idx if step is None else step
        query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        cache = self_attention_cache(past_key_values)
        layer = None if cache is None else cache.layers[step]
        sinks = self._sinks(key, value, context, layer if isinstance(layer, SinkWindowLayer) else None)
        output, weights = self._attend_with_sinks(query, key, value, sinks, context)
        losses = self.losses(Heads(self, query, key, value, output, weights, context))
        return SublayerOutput(self.written(output, context, hidden_states), weights, aux_losses=losses)

    def _sinks(self, key: Tensor, value: Tensor, context: Call, layer: SinkWindowLayer | None) -> Sinks:
        """The first real tokens among all so far; those that are new go into the cache."""
        batch, total, padding = key.shape[0], context.key_index.shape[0], context.padding_mask
        dropped = total - key.shape[2]
        if context.parts is not None:
            total, padding = context.parts.total_length, context.parts.mask
        places = torch.arange(self.spec.sinks, device=key.device).expand(batch, -1)
        if padding is None:
            slots, real = places.clamp(max=total - 1), places < total
        else:
            order = real_first(padding)
            slots = order.gather(1, places.clamp(max=total - 1))
            real = padding.gather(1, slots) & (places < total)
        if context.parts is not None:
            keys, values = context.parts.chosen(torch.cat((key, value), dim=1), slots).chunk(2, dim=1)
            return Sinks(keys, values, slots, real)
        index = (slots - dropped).clamp(min=0)[:, None, :, None]
        taken = tuple(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
        if layer is not None:
            if layer.sinks is not None:
                new = (slots >= context.query_index[0])[:, None, :, None]
                taken = tuple(torch.where(new, x, old) for x, old in zip(taken, layer.sinks, strict=True))
            layer.sinks = (taken[0], taken[1])
        return Sinks(taken[0], taken[1], slots, real)

    def _attend_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Sinks, context: Call
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, H, d], and weights [B, H, T, S] where they are wanted."""
        total, size = context.key_index.shape[0], self.spec.window_size
        dropped, dropout = total - key.shape[2], self.dropout if self.training else 0.0
        first = 0 if context.parts is None else context.parts.start
        distance = context.query_index[None, :, None] + first - sinks.slots[:, None]  # [B, T, k]
        beyond = distance >= size if self.is_causal else distance.abs() > size
        seen = sinks.real[:, None] & beyond
        if context.parts is not None:
            result: Any = attend_to_window(self, (query, key, value), context, Beside(sinks.key, sinks.value, seen))
            return (result if self.sinks is None else self.less_sinks(*result)).transpose(1, 2), None
        if self.wants_weights(context) or context.static or query.shape[2] <= FEW_QUERIES:
            local = self._pairs(context)[..., dropped:]
            seen = seen[:, None].expand(-1, local.shape[1], -1, -1)
            mask = torch.cat((local.expand(query.shape[0], -1, -1, -1), seen), dim=-1)
            keys, values = torch.cat((key, sinks.key), dim=2), torch.cat((value, sinks.value), dim=2)
            output, found = literal_softmax_attention(
                query, keys, values, mask, None, self.scaling, dropout, self.spec.score_cap, self.sinks
            )
            weights = found.new_zeros(*found.shape[:3], total)
            weights[..., dropped:] = found[..., : key.shape[2]]
            index = sinks.slots[:, None, None].expand(-1, *found.shape[1:3], -1)
            return output, weights.scatter_add(3, index, found[..., key.shape[2] :])
        # One kernel of an accelerator serves window and sinks; on a processor tiles with few columns cost more.
        joined = query.device.type != "cpu" and dropped == 0
        padding = context.padding_mask
        result = block_sparse_attention(
            query,
            key,
            value,
            self.pattern | global_(self.spec.sinks, rows=False) if joined else self.pattern,
            key_padding_mask=None if padding is None else padding[:, dropped:],
            query_offset=total - query.shape[2],
            key_offset=dropped,
            causal=self.is_causal,
            scale=self.scaling,
            dropout=dropout,
            side_key=None if joined else sinks.key,
            side_value=None if joined else sinks.value,
            side_mask=None if joined else seen,
            score_cap=self.spec.score_cap,
            return_lse=self.sinks is not None,
        )
        return (result if self.sinks is None else self.less_sinks(*result)).transpose(1, 2), None


@register("attention", "sliding_window", aliases=("streaming_llm",))
class SlidingWindowSpec(BlockSparseSpec):
    """A sliding window and the first tokens of a text (StreamingLLM). Time O(T (window + sinks)).

    window_size: keys on each side of a token; in a decoder, keys that a token reads, its own included. sinks: how many
    first tokens every token reads besides its window (0: none, which is `band_attention`; the authors take 4).
    """

    summary = "a sliding window, and the first tokens stay in sight"
    acts = frozenset({"rotation"})
    supports = frozenset({"token_numbers"})
    head_options = frozenset({"cap", "norm", "parts", "sink"})

    window_size: int = bounded(256, "window", least=1)
    sinks: int = bounded(4, least=0)

    @property
    def keeps_rotated(self) -> bool:  # type: ignore[override]
        return self.sinks > 0

    def pattern(self, config, layer_idx: int) -> Pattern:
        return window(self.window_size, config.is_decoder)

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return form_of_window(self, config, SequenceForm.CHOSEN if self.sinks else SequenceForm.NEIGHBOURS)

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        return SinkWindowLayer(max(self.window_size, 2)) if self.sinks else window_cache(self.window_size)

    def build(self, config, **where) -> SlidingWindowAttention:
        return SlidingWindowAttention(config, self, **where)


__all__ = ["SinkWindowLayer", "SlidingWindowAttention", "SlidingWindowSpec"]
