# SPDX-License-Identifier: Apache-2.0
"""Adaptive attention span: every head learns how far back it reads."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import Carry, Key, Prepared, State, States, one_state
from ..core.segment_memory import MemoryLayout, SegmentCacheLayer, StepMemory, take_slots
from ..core.visibility import visible_block, visible_pairs
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import band
from ..ops.common.products import wide_products
from ..ops.common.shifted_rows import shift_rows
from ..ops.score_terms.attention import window_attention
from ..position.base import CallBias
from .shared.base import Attention
from .shared.query_blocks import over_query_blocks, rows_at_once, shared_rows
from .shared.spans import SpanCacheLayer, UnitClamp
from .shared.spec import AttentionSpec

TRIM = 64  # spans are rounded up to this many tokens, so that plans for them can be used again


class WithMemory(Prepared):
    """What is made for the tokens of a call with those before them."""

    made: dict[Key, Any]


class RelativeKeys(State):
    """The relative keys of layer 0, [1, ...]."""

    keys: Tensor


class AdaptiveSpanAttention(Attention):
    """A_h[i, j] = m_h(x) exp(s_ij) / sum_r m_h(x_r) exp(s_ir), with m_h(x) = clamp((R + z_h - x) / R, 0, 1).

    Sukhbaatar, Grave, Bojanowski and Joulin 2019 (arXiv 1905.07799), section 3. x counts from 0 at the nearest
    previous token (with `include_self` at the token itself) up to S - 1, S = `max_span`; an encoder (not in the paper)
    reads both sides, x = |i - j| - 1. s_ij = (q_i k_j + q_i p_(i-j)) / sqrt(d), where the relative keys p are shared
    by heads and
    layers: the first layer owns them and hands them on. z_h = S u_h, u_h learned in [0, 1]; dynamic spans are
    z_(h,i) = S sigmoid(v_h x_i + b_h) for every token. The loss gains coef * S * mean_h u_h in every layer ("span").

    A number u outside [0, 1] counts as the border, and its gradient only leads inwards, so no step of an optimizer
    needs a clamp afterwards. (Weight decay shortens spans too, so `span` is left out of it.)

    Keys farther than ceil(max z) + R are never computed: time O(T (max z + R) D), memory O(T D). With a score bias
    or dynamic spans, scores are made block by block of queries, else in tiles that stay in a processor's cache.
    State: that many keys and values, at most S. A compiled model takes S for the span, with the same results.
    Under a stack with a segment memory (the paper's training, section 4: `segment_recurrent`) a token reads the states
    of earlier segments as far as its span reaches.
    A token that reads nothing (without `include_self`: the first) gets zeros.

    Raises:
        ValueError: relative keys are wanted and the first layer is of another type.
    """

    spec: AdaptiveSpanSpec

    undecayed = ("span",)

    joins_projections = True

    def __init__(self, config, spec: AdaptiveSpanSpec, **where):
        super().__init__(config, spec, **where)
        self.max_span, self.gap = spec.longest(config), 0 if spec.include_self else 1
        if spec.dynamic:
            self.span_proj = nn.Linear(config.hidden_size, self.num_heads)
        else:
            self.span = nn.Parameter(torch.empty(self.num_heads))
        self.relative_keys = None
        if spec.relative_keys and self.layer_idx == 0:
            rows = self.max_span if self.is_causal else 2 * (self.max_span + self.gap) - 1
            self.relative_keys = nn.Parameter(torch.empty(rows, self.head_dim))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.spec.dynamic:
            start = min(max(self.spec.start, 0.01), 0.99)
            init.constant_(self.span_proj.bias, math.log(start / (1 - start)))
        else:
            init.constant_(self.span, self.spec.start)
        if self.relative_keys is not None:
            init.normal_(self.relative_keys, mean=0.0, std=1.0)  # released code

    # ------------------------------------------------------------------------------------------------ spans

    def spans(self, hidden_states: Tensor | None = None) -> Tensor:
        """z in tokens, in float32 or better: [H], or [B, H, T] for dynamic spans of hidden_states [B, T, D]."""
        if self.spec.dynamic:
            share = torch.sigmoid(self.span_proj(hidden_states)).transpose(1, 2)
            return share.to(torch.promote_types(share.dtype, torch.float32)) * self.max_span
        share = self.span.to(torch.promote_types(self.span.dtype, torch.float32))
        return UnitClamp.apply(share) * self.max_span

    def _reach(self, spans: Tensor, context: Call) -> list[int]:
        """For every head, the number of distances with m > 0."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or context.static:
            return [self.max_span] * self.num_heads
        longest = spans.detach().amax((0, 2)) if self.spec.dynamic else spans.detach()
        return [min(self.max_span, math.ceil(z + self.spec.ramp)) for z in longest.tolist()]

    def _distance(self, offset: Tensor) -> Tensor:
        """x of the offsets i - j; negative where nothing may be read."""
        return (offset if self.is_causal else offset.abs()) - self.gap

    def _mask(self, offset: Tensor, spans: Tensor) -> Tensor:
        """m of offsets i - j and spans, which broadcast; zero where nothing may be read."""
        x = self._distance(offset)
        ramp = ((self.spec.ramp + spans - x) / self.spec.ramp).clamp(0.0, 1.0)
        return torch.where((x >= 0) & (x < self.max_span), ramp, 0.0)

    def _span_loss(self, spans: Tensor, context: Call) -> dict[str, Tensor] | None:
        if self.spec.loss_coef == 0:
            return None
        real = context.query_padding_mask
        if self.spec.dynamic and real is not None:
            mean = (spans * real[:, None]).sum() / (real.sum() * self.num_heads).clamp(min=1)
        else:
            mean = spans.mean()
        return {"span": self.spec.loss_coef * mean}

    # ------------------------------------------------------------------------------------------------ forward

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
        cache = self_attention_cache(past_key_values)
        layer = cache.layers[step] if cache is not None and step < len(cache.layers) else None
        call = context
        if context.state(StepMemory) is not None or isinstance(layer, SegmentCacheLayer):
            query, key, value, context = self._with_memory(hidden_states, context, cache, step)
        else:
            query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        spans = self.spans(hidden_states)
        reach = self._reach(spans, context)
        if isinstance(layer, SpanCacheLayer):
            # The spans of later tokens are not known when every token chooses its own.
            needed = self.max_span if self.spec.dynamic else max(reach)
            layer.keep(needed - 1 + self.gap)
        relative, states = self._relative_keys(context)
        inputs, weights = (query * self.scaling, key, value, spans, relative, context), None
        if self.wants_weights(context):
            output, weights = self._literal(*inputs)
        elif context.static:
            output, _ = self._literal(*inputs)
        elif self._engine_applies(query, relative, context):
            output = self._engine(*inputs[:4], reach, context)
        elif self._tiles_apply(query, context):
            output = self._tiles(*inputs[:5], max(reach), context)
        else:
            output = self._windows(*inputs[:5], max(reach), context)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights, aux_losses=self._span_loss(spans, call), states=states)

    def _with_memory(
        self, hidden_states: Tensor, context: Call, cache: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Queries, and keys and values of what a stack remembers, what a cache holds and the tokens, in this order;
        and the call as they see it."""
        tokens, real = hidden_states, context.query_padding_mask
        earlier = context.state(StepMemory)
        if earlier is not None:
            layout = context.prepared(MemoryLayout)
            tokens, real, order = torch.cat([earlier.states, hidden_states], dim=1), layout.real, layout.order
            tokens = tokens if order is None else take_slots(tokens, order)
        query, key, value = self.queries(hidden_states), self.keys(tokens), self.heads(self.v_proj(tokens))
        if cache is not None:
            layer = cache.layers[step]
            if not isinstance(layer, SegmentCacheLayer):
                raise ValueError(
                    "adaptive_span keeps a memory before the last keys and values, which a"
                    f" {type(cache).__name__} has no place for; leave `past_key_values` out, or make it with"
                    " `hf_xformers.core.cache.make_cache(config)`."
                )
            begun = MemoryLayout.of(context).begun
            key, value, real = layer.extend(key, value, real, hidden_states.shape[1], begun)
        index = torch.arange(key.shape[2], device=key.device)
        seen = copy.copy(context)
        seen.padding_mask, seen.key_index, seen.query_index = real, index, index[-query.shape[2] :]
        seen.fresh = False
        # What others share in this call is of its tokens alone.
        seen.made = context.prepare(WithMemory, lambda: WithMemory(context.kept(CallBias))).made
        return query, key, value, seen

    def _relative_keys(self, context: Call) -> tuple[Tensor | None, States | None]:
        """The relative keys p, and what to pass on."""
        if not self.spec.relative_keys:
            return None, None
        if self.relative_keys is not None:
            # A copy: a parameter that is sharded over devices is whole only inside its own layer.
            own = self.relative_keys.clone()
            return own, one_state(RelativeKeys(own[None]))
        handed = context.state(RelativeKeys)
        if handed is None:
            raise ValueError(
                f"adaptive_span layer {self.layer_idx} was handed no relative keys, which layer 0 owns; make layer 0 "
                "adaptive_span too, or set its `relative_keys=False` and choose a position component."
            )
        return handed.keys[0], None

    def _relative_rows(self, offset: Tensor) -> Tensor:
        """Rows of the relative keys for offsets i - j; those out of reach get some row."""
        if self.is_causal:
            return (offset - self.gap).clamp(0, self.max_span - 1)
        longest = self.max_span - 1 + self.gap
        return offset.clamp(-longest, longest) + longest

    def _literal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Tensor,
        relative: Tensor | None,
        context: Call,
    ) -> tuple[Tensor, Tensor]:
        """The equation as written -> output [B, T, H, d], weights [B, H, T, S] (zeros for tokens that a cache
        dropped)."""
        key, value = self.repeated(key), self.repeated(value)
        dropped = context.key_index.shape[0] - key.shape[2]
        places = context.key_index[dropped:]
        offset = context.query_index[:, None] - places[None, :]
        scores = wide_products(query, key)
        if relative is not None:
            rows = self._relative_rows(offset).expand(*scores.shape)
            scores = scores + wide_products(query, relative).gather(-1, rows)
        bias = self.score_bias(context)
        if bias is not None:
            scores = scores + bias.block(context.query_index, places)
        scores = scores.to(spans.dtype)
        mask = self._mask(offset, spans[..., None] if self.spec.dynamic else spans[:, None, None])
        seen = mask > 0
        pairs = visible_pairs(context)
        if pairs is not None:
            seen = seen & pairs[..., -key.shape[2] :]
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        powers = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
        powers = torch.where(seen, mask * powers, 0.0)
        weights = powers / _not_zero(powers.sum(-1, keepdim=True))
        weights = weights.to(value.dtype)
        thinned = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
        output = torch.matmul(thinned, value).transpose(1, 2)
        return output, F.pad(weights, (dropped, 0)) if dropped else weights  # a padded copy would carry no gradient

    def _tiles_apply(self, query: Tensor, context: Call) -> bool:
        """Whether all that is added to the products depends on the distance alone, and tiles are the way to go: on a
        processor. Elsewhere few large blocks are."""
        plain = not self.spec.dynamic and self.score_bias(context) is None
        return plain and query.device.type == "cpu" and query.shape[2] > 1 and not torch.compiler.is_compiling()

    def _tiles(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Tensor,
        relative: Tensor | None,
        reach: int,
        context: Call,
    ) -> Tensor:
        """The window that all heads share, in small tiles -> [B, T, H, d]."""
        reach = min(reach, key.shape[2])
        side = reach - 1 + self.gap
        offset = side - torch.arange(reach if self.is_causal else 2 * side + 1, device=query.device)
        bias = _log(self._mask(offset, spans[:, None]))
        table = None if relative is None else relative[self._relative_rows(offset)]
        dropped = context.key_index.shape[0] - key.shape[2]

        def visible(queries: slice, keys: slice) -> Tensor:
            keys = slice(dropped + keys.start, dropped + keys.stop)
            # The order is in the offsets; it is asked only where something else hides keys.
            found: Any = visible_block(context, False, queries, keys, order=False)
            return found

        masks = (context.padding_mask, context.explicit_mask, context.segment_ids)
        masked = any(mask is not None for mask in masks)
        key, value = self.repeated(key), self.repeated(value)
        output = window_attention(query, key, value, bias, table, side, visible if masked else None, self.dropout_now)
        return output.transpose(1, 2)

    def _windows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Tensor,
        relative: Tensor | None,
        reach: int,
        context: Call,
    ) -> Tensor:
        """Blocks of queries against the keys within reach -> [B, T, H, d].

        What depends on the offset i - j alone is computed per offset and laid out along the diagonals.
        """
        (batch, heads, length, _), keys = query.shape, key.shape[2]
        reach = min(reach, keys)
        total, side = context.key_index.shape[0], reach - 1 + self.gap
        bias, dropout = self.score_bias(context), self.dropout_now
        at_once = min(max(min(reach, 128), TRIM), rows_at_once(2 * batch * heads * reach))
        whole = [shared_rows(x, length, at_once) for x in (key, value)]

        def block(begin: int, end: int, q: Tensor, chosen: Tensor | None) -> Tensor:
            count = end - begin
            place = keys - length + begin  # of the first query among the keys
            low, high = max(place - side, 0), place + count if self.is_causal else min(place + count + side, keys)
            rows, seen = slice(begin, end), slice(total - keys + low, total - keys + high)
            k, v = (self.repeated(x.take(low, high)) for x in whole)
            # Column c of `along` holds the offset that stands in column c - (count - 1 - row) of the block.
            offset = place - low + count - 1 - torch.arange(count + high - low, device=q.device)
            own = spans[:, None, None] if chosen is None else chosen[..., None]
            along = _log(self._mask(offset, own)).expand(*own.shape[:-2], count, -1)
            if relative is not None:
                along = along + wide_products(q, relative[self._relative_rows(offset)])
            scores = shift_rows(along, high - low) + wide_products(q, k)
            if bias is not None:
                scores = scores + bias.block(context.query_index[rows], context.key_index[seen])
            mask = visible_block(context, False, rows, seen, order=False)  # the order is in the offsets
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            top = scores.detach().amax(-1, keepdim=True)
            powers = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
            weights = powers / _not_zero(
                powers.sum(-1, keepdim=True)
            )  # before the cast: sums over a text may have no room
            weights = F.dropout(weights, dropout) if dropout else weights
            return torch.matmul(weights.to(v.dtype), v).transpose(1, 2)

        return over_query_blocks(block, length, at_once, (query, 2), (spans if self.spec.dynamic else None, 2))

    def _engine_applies(self, query: Tensor, relative: Tensor | None, context: Call) -> bool:
        """Scores that depend on the offset alone, besides the products."""
        plain = relative is None and not self.spec.dynamic and context.explicit_mask is None
        return plain and query.shape[2] > 1 and not torch.compiler.is_compiling()

    def _engine(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Tensor, reach: list[int], context: Call
    ) -> Tensor:
        """The block-sparse engine, where each head walks its own window -> [B, T, H, d]."""
        sides = [min(-(-count // TRIM) * TRIM, self.max_span) - 1 + self.gap for count in reach]
        patterns = [band(side, 0 if self.is_causal else side) for side in sides]
        bias = self.score_bias(context)
        keys, total = key.shape[2], context.key_index.shape[0]

        def score_bias(q_at: Tensor, k_at: Tensor) -> Tensor:
            offset = q_at[..., :, None] - k_at[..., None, :]
            own = _log(self._mask(offset[..., None, :, :], spans[:, None, None]))
            return own if bias is None else own + bias.block(q_at, k_at)

        output: Any = block_sparse_attention(
            query,
            key,
            value,
            patterns if len(set(sides)) > 1 else patterns[0],
            key_padding_mask=None if context.padding_mask is None else context.padding_mask[:, total - keys :],
            query_offset=total - query.shape[2],
            key_offset=total - keys,
            scale=1.0,
            dropout=self.dropout_now,
            score_bias=score_bias,
            bias_is_relative=bias is None,
            segment_ids=context.segment_ids,
        )
        return output.transpose(1, 2)


def _log(mask: Tensor) -> Tensor:
    """log m, -inf at 0, where the gradient is zero and not NaN."""
    return torch.where(mask > 0, torch.log(torch.where(mask > 0, mask, 1.0)), -math.inf)


def _not_zero(sums: Tensor) -> Tensor:
    """Sums of rows to divide by: 1 for rows of zeros, which stay zeros, in the gradient as well."""
    return sums.masked_fill(sums == 0, 1.0)


@register("attention", "adaptive_span")
class AdaptiveSpanSpec(AttentionSpec):
    """
    Args:
        max_span: longest span in tokens (`None`: `max_position_embeddings`).
        ramp: tokens over which a span fades out.
        start: first value of the spans, as a part of max_span.
        loss_coef: weight of the mean span in the loss (per token of span).
        include_self: whether a token reads itself, which the paper leaves to the residual connection.
        relative_keys: learned keys by distance.
        dynamic: each token chooses its spans.
    """

    summary = "each head learns how far back it reads"
    head_options = frozenset({"norm"})
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})
    knows_order = True
    reads = frozenset({HandOver.SEGMENT_MEMORY})

    max_span: int | None = bounded(None, least=1)
    ramp: int = bounded(32, least=1)
    start: float | int = bounded(0.0, least=0, most=1)
    loss_coef: float | int = bounded(5e-7, least=0)
    include_self: bool = False
    relative_keys: bool = True
    dynamic: bool = False

    def longest(self, config) -> int:
        return config.max_position_embeddings if self.max_span is None else self.max_span

    def carries(self, config) -> Carry | None:
        sizes = (self.longest(config), self.include_self, config.head_width)
        return Carry(RelativeKeys, sizes, of_first=True, handed_on=True) if self.relative_keys else None

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        """The tokens within the longest span, or more where a stack's memory is longer."""
        window, slots = self.longest(config) + (0 if self.include_self else 1), config.stack.memory_slots(config)
        return SpanCacheLayer(sliding_window=window) if slots is None else SegmentCacheLayer(max(window - 1, slots))

    def check(self, config) -> None:
        if config.stack.memory_slots(config) is not None and "rotation" in config.position.acts:
            raise ValueError(
                f"adaptive_span reads the memory of stack {config.stack.type!r}, whose states have no places for"
                f" position {config.position.type!r} to turn; use position 'none' and its own relative keys, or a"
                " score bias."
            )

    def weighs(self, config) -> bool:
        return self.include_self

    def build(self, config, **where) -> AdaptiveSpanAttention:
        return AdaptiveSpanAttention(config, self, **where)
