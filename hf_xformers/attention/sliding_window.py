# SPDX-License-Identifier: Apache-2.0
"""A sliding window, and the first tokens of a text, which stay in sight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.cache import FollowsRows, WindowLayer
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import FULL, Pattern, global_
from ..ops.common.real_tokens import real_first
from ..position.base import TokenNumbers
from .shared.base import literal_softmax_attention
from .shared.block_sparse import FEW_QUERIES, BlockSparseAttention
from .shared.head_parts import Heads
from .shared.pattern_spec import BlockSparseSpec, window, window_cache
from .shared.window_parts import Beside, attend_to_window, form_of_window


class Sinks(NamedTuple):
    """The first real tokens of each row: keys and values [B, K, k, d], their slots [B, k], and which of them queries
    read besides their window, [B, T, k]."""

    key: Tensor
    value: Tensor
    slots: Tensor
    seen: Tensor


class SinkWindowLayer(FollowsRows, WindowLayer):
    """The keys and values of a window, and those of the first tokens of each row. Its size does not grow.

    In single steps, which then copy nothing, `keys` and `values` hold the first tokens and behind them the whole
    window as a ring, whose oldest token stands at `oldest` (else None).
    """

    is_croppable = False

    def __init__(self, sliding_window: int, **kwargs: Any):
        super().__init__(sliding_window, **kwargs)
        self.sinks: tuple[Tensor, Tensor] | None = None
        self.oldest: int | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.oldest is not None:
            ring = (x[:, :, -self.sliding_window :].roll(-self.oldest, dims=2) for x in self._held())
            self.keys, self.values = (x[:, :, 1:] for x in ring)
            self.oldest = None
        return super().update(key_states, value_states, *args, **kwargs)

    def takes_step(self) -> bool:
        """Whether [`replace`] may take the next token: the window is full, and nobody needs its keys for gradients."""
        if self.keys is None or self.sinks is None or self.record_past or torch.is_grad_enabled():
            return False
        return self.oldest is not None or self.keys.shape[2] == self.sliding_window - 1

    def replace(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value [B, K, 1, d] of one more token, in the place of the oldest of the window -> those of the first
        tokens and the window, [B, K, k + w, d], in no order."""
        held = self._held()
        if self.oldest is None:
            assert self.sinks is not None
            held = tuple(torch.cat(parts, dim=2) for parts in zip(self.sinks, held, (key, value)))
            self.oldest = 0
        else:
            if held[0].is_inference() and not torch.is_inference_mode_enabled():
                held = tuple(x.clone() for x in held)
            for ring, new in zip(held, (key, value)):
                ring[:, :, -self.sliding_window :][:, :, self.oldest] = new[:, :, 0]
            self.oldest = (self.oldest + 1) % self.sliding_window
        self.keys, self.values = held
        self.cumulative_length += 1
        return held[0], held[1]

    def _held(self) -> tuple[Tensor, ...]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def reset(self) -> None:
        super().reset()
        self.sinks, self.oldest = None, None

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
        cache = self_attention_cache(past_key_values)
        layer = None if cache is None or step >= len(cache.layers) else cache.layers[step]  # stock caches grow by it
        layer = layer if isinstance(layer, SinkWindowLayer) else None
        weights: Tensor | None = None
        if cache is not None and layer is not None and not cache.offloading and self._reads_all(layer, context):
            query, *new = self.project_self(hidden_states, context, None, step)
            key, value = layer.replace(*new)
            result: Any = block_sparse_attention(
                *(query, key, value, FULL),
                scale=self.scaling,
                score_cap=self.spec.score_cap,
                return_lse=self.sinks is not None,
            )
            output = (result if self.sinks is None else self.less_sinks(*result)).transpose(1, 2)
        else:
            query, key, value = self.project_self(hidden_states, context, past_key_values, step)
            sinks = self._sinks(key, value, context, layer)
            output, weights = self._attend_with_sinks(query, key, value, sinks, context)
        losses = self.losses(Heads(self, query, key, value, output, weights, context))
        return SublayerOutput(self.written(output, context, hidden_states), weights, aux_losses=losses)

    def _reads_all(self, layer: SinkWindowLayer, context: Call) -> bool:
        """Whether this is a step of one token that reads all that its cache holds: the window is full and has left the
        first tokens, and nothing is padded."""
        total = context.key_index.shape[0]
        if context.query_index.shape[0] != 1 or total < self.spec.window_size + self.spec.sinks:
            return False
        if context.padding_mask is not None or context.state(TokenNumbers) is not None or self.wants_weights(context):
            return False
        rotation = self.rotation(context)
        if is_compiling() or (rotation is not None and rotation.by_length):
            return False
        return layer.takes_step() and layer.sliding_window == self.spec.window_size

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
            return Sinks(keys, values, slots, real[:, None] & self._beyond(slots, context))
        index = (slots - dropped).clamp(min=0)[:, None, :, None]
        taken = tuple(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
        if layer is not None:
            if layer.sinks is not None:
                new = (slots >= context.query_index[0])[:, None, :, None]
                taken = tuple(torch.where(new, x, old) for x, old in zip(taken, layer.sinks, strict=True))
            layer.sinks = (taken[0], taken[1])
        return Sinks(taken[0], taken[1], slots, real[:, None] & self._beyond(slots, context))

    def _beyond(self, slots: Tensor, context: Call) -> Tensor:
        """Whether slots [B, k] lie outside of the windows of the queries, and not behind them, [B, T, k]."""
        first = 0 if context.parts is None else context.parts.start
        distance = context.query_index[None, :, None] + first - slots[:, None]
        return distance >= self.spec.window_size if self.is_causal else distance.abs() > self.spec.window_size

    def _attend_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Sinks, context: Call
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, H, d], and weights [B, H, T, S] where they are wanted."""
        total, dropout, seen = context.key_index.shape[0], self.dropout_now, sinks.seen
        dropped = total - key.shape[2]
        if context.parts is not None:
            result: Any = attend_to_window(self, (query, key, value), context, Beside(sinks.key, sinks.value, seen))
            return (result if self.sinks is None else self.less_sinks(*result)).transpose(1, 2), None
        if self.wants_weights(context) or context.static or (query.shape[2] <= FEW_QUERIES and is_compiling()):
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
