# SPDX-License-Identifier: Apache-2.0
"""Memory-compressed attention: layers that read blocks of tokens, and layers that read all blocks, each as one."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer, SlotStateLayer
from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.visibility import tokens_in_order
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.fused import fused_attention
from ..ops.common.real_tokens import from_first_real, real_first, real_places
from ..ops.pooled_blocks import pooled_blocks
from .shared.base import Attention, cross_cache, given_memory, literal_softmax_attention
from .shared.block_sparse import BlockSparseAttention
from .shared.linear import state_layer
from .shared.spec import AttentionSpec


class MemoryCompressedState(SlotStateLayer):
    """What either type of layer needs of the tokens read. A local layer keeps the keys and values of the last `reach`
    tokens; a compressed one its slots, the tokens behind the last whole block, and how many it has read."""

    def __init__(self, reach: int):
        super().__init__()
        self.reach = reach

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, d] of new tokens -> the same after those that are kept."""
        added = key_states.shape[2]
        if self.state:
            key_states = torch.cat([self.state["keys"], key_states], dim=2)
            value_states = torch.cat([self.state["values"], value_states], dim=2)
        first = max(key_states.shape[2] - self.reach, 0)
        kept = (x[:, :, first:].clone() if first else x for x in (key_states, value_states))  # frees the rest
        self.advance(added, **dict(zip(("keys", "values"), kept)))
        return key_states, value_states


class LocalBlockAttention(BlockSparseAttention):
    """softmax(scale * q_i K^T) V over i's own block of `block_size` tokens and `local_lookback` blocks before it, in
    an encoder also after it (Liu et al. 2018, arXiv 1801.10198, section 4.2.4)."""

    def _literal(self, context: Call, queries: int) -> bool:
        # Blocks begin at a text's first real token, of which a cache of the last blocks knows nothing.
        return super()._literal(context, queries) or not (context.fresh or context.padding_mask is None)


class CompressedAttention(Attention):
    """o_i = softmax(scale * q_i (M W_k)^T) (M W_v), M the slots m_0, m_1, ... of the text.

    Liu et al. 2018 (arXiv 1801.10198), section 4.2.4, as in the authors' tensor2tensor: m_b = C [x_{(b-1) r}; ...;
    x_{b r - 1}] + c, a convolution of kernel and stride r over tokens, before the projections and thus shared by keys
    and values; m_0 = x_0, so that there is something to read before the first block is complete. Token i of a decoder
    reads m_b iff b r <= i: only blocks that are complete before it, never its own. In an encoder and as
    cross-attention all blocks are read, the last one filled up with zeros. Blocks count real tokens, from a text's
    first one on.

    Time O(T^2 D / r), memory O(T D): the tokens (n, p), n r + p, of one p see slots 0 ... n, so that causal attention
    of T / r queries to T / r slots serves each p without a mask. State: the slots, T / r of them, and at most r - 1
    tokens. Of the weights given out, a slot's is divided equally among its tokens.
    """

    spec: MemoryCompressedSpec

    def __init__(self, config, spec: MemoryCompressedSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        width, self.factor = config.hidden_size, spec.compression_factor
        self.compress_proj = nn.Linear(self.factor * width, width, bias=spec.bias) if spec.compress == "conv" else None
        self.null = nn.Parameter(torch.empty(width)) if spec.first_slot == "null" else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.null is not None:
            init.zeros_(self.null)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if not self.cross and context.fresh:
            tokens_in_order(context)

    # ------------------------------------------------------------------------------------------- slots

    def _blocks(self, tokens: Tensor, count: Tensor | None) -> Tensor:
        """tokens [B, S, D], zeros beyond the `count` [B] real ones -> blocks of them [B, ceil(S / r), D]."""
        if self.compress_proj is None:
            found = pooled_blocks(tokens, self.factor, count, self.spec.compress)
        else:
            tokens = F.pad(tokens, (0, 0, 0, -tokens.shape[1] % self.factor))
            found = self.compress_proj(tokens.unflatten(1, (-1, self.factor)).flatten(2))
        return F.silu(found) if self.spec.compress_activation == "silu" else found

    def _first(self, tokens: Tensor) -> Tensor:
        """m_0 [B, 1, D] of tokens [B, S, D]."""
        return tokens[:, :1] if self.null is None else self.null.expand(tokens.shape[0], 1, -1)

    def _keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys(memory), self.heads(self.v_proj(memory))

    def _slots_in_use(self, mask: Tensor | None, slots: int) -> Tensor | None:
        """[B, slots]: which of them hold a real token of an encoder's text."""
        if mask is None:
            return None
        starts = torch.arange(slots, device=mask.device) - 1
        return starts.clamp(min=0) * self.factor < mask.sum(-1, keepdim=True)

    # ------------------------------------------------------------------------------------------- forward

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
        query = self.queries(hidden_states)
        if self.is_causal:
            output, weights = self._causal(query, hidden_states, context, state_layer(past_key_values, step))
        else:
            output, weights = self._full(query, hidden_states, memory, context, past_key_values, step)
        return SublayerOutput(self.o_proj(output.flatten(2)), weights)

    def _full(
        self,
        query: Tensor,
        hidden_states: Tensor,
        memory: Tensor | None,
        context: Call,
        past: Cache | None,
        step: int,
    ) -> tuple[Tensor, Tensor | None]:
        """All slots for every query: encoders, and cross-attention, whose slots are made once per generated text."""
        mask = context.memory_padding_mask if self.cross else context.padding_mask
        cache = cross_cache(past) if self.cross and not context.static else None
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            key, value = layer.keys, layer.values
        else:
            tokens = given_memory(memory) if self.cross else hidden_states
            count = None
            if mask is not None:
                order = real_first(mask) if self.cross else cast(Tensor, tokens_in_order(context))
                tokens, count = _gathered(tokens, order, mask), mask.sum(-1)
            key, value = self._keys_and_values(torch.cat([self._first(tokens), self._blocks(tokens, count)], dim=1))
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, step)
                cache.is_updated[step] = True
        used = self._slots_in_use(mask, key.shape[2])
        used = None if used is None else used[:, None, None]
        length = query.shape[2] if not self.cross else None if memory is None else memory.shape[1]
        return self._attention(query, key, value, used, context, mask, length)

    def _causal(
        self, query: Tensor, hidden_states: Tensor, context: Call, layer: RecurrentStateLayer | None
    ) -> tuple[Tensor, Tensor | None]:
        mask, length = context.query_padding_mask, query.shape[2]
        if layer is not None and layer.state:
            key, value = self._read_on(hidden_states, mask, layer)
            before = layer.state["count"] - self._reals(mask, hidden_states)[:, None]
            return self._by_place(query, key, value, before + _places(mask, length, query.device), context)
        tokens, order = hidden_states, None
        if mask is not None:
            order = cast(Tensor, tokens_in_order(context))
            tokens = _gathered(tokens, order, mask)
        groups = -(-length // self.factor)
        whole = length // self.factor if layer is not None else groups - 1  # blocks; nobody reads the last one yet
        blocks = self._blocks(tokens[:, : whole * self.factor], None if mask is None else mask.sum(-1))
        key, value = self._keys_and_values(torch.cat([self._first(tokens), blocks], dim=1))
        if layer is not None:
            count = self._reals(mask, hidden_states)
            tail = _rows_from(tokens, count // self.factor * self.factor, self.factor - 1)
            layer.advance(length, slot_keys=key, slot_values=value, tail=tail, count=count[:, None])
        if self.wants_weights(context):
            return self._by_place(query, key, value, _places(mask, length, query.device), context)
        if order is not None:
            query = query.gather(2, order[:, None, :, None].expand_as(query))
        output = self._by_phase(query, key[:, :, :groups], value[:, :, :groups])
        if order is not None and mask is not None:
            back = order.argsort(dim=-1)
            output = output.gather(1, back[..., None, None].expand_as(output))
            output = output.masked_fill(~mask[..., None, None], 0.0)
        return output, None

    def _by_phase(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, H, T, d] with the slots [B, K, ceil(T / r), d] -> [B, T, H, d]: query n r + p reads slots
        0 ... n."""
        (batch, heads, length, _), groups = query.shape, key.shape[2]
        query = F.pad(query, (0, 0, 0, groups * self.factor - length))
        query = query.unflatten(2, (groups, self.factor)).transpose(2, 3).flatten(1, 2)  # [B, H r, T / r, d]
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        output = fused_attention(query, key, value, dropout_p=self.dropout_now, is_causal=True, scale=self.scaling)
        output = output.view(batch, heads, self.factor, groups, -1).permute(0, 3, 2, 1, 4)
        return output.reshape(batch, groups * self.factor, heads, -1)[:, :length]

    def _by_place(
        self, query: Tensor, key: Tensor, value: Tensor, place: Tensor, context: Call
    ) -> tuple[Tensor, Tensor | None]:
        """Queries at `place` [B or 1, T] of their texts with slots [B, K, N, d], of which they see b r <= place, and
        padding sees none."""
        seen = (torch.arange(key.shape[2], device=key.device) * self.factor <= place[..., None])[:, None]
        if context.query_padding_mask is not None:
            seen = seen & context.query_padding_mask[:, None, :, None]
        return self._attention(query, key, value, seen, context, context.padding_mask, context.key_index.shape[0])

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor | None,
        context: Call,
        mask: Tensor | None,
        length: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax attention to the slots that are `seen` [B or 1, 1, T or 1, N] -> output [B, T, H, d] and the weights
        of `length` tokens, of which those in `mask` are real."""
        if self.wants_weights(context):
            output, weights = literal_softmax_attention(query, key, value, seen, None, self.scaling, self.dropout_now)
            return output, None if length is None else self._of_tokens(weights, mask, length)
        empty = None
        if seen is not None:  # a softmax over nothing is NaN: let such a row see everything and blank its output
            empty = ~seen.any(-1, keepdim=True)
            seen = seen | empty
        output = fused_attention(
            *(query, key, value, seen),
            dropout_p=self.dropout_now,
            scale=self.scaling,
            enable_gqa=self.num_key_value_groups > 1,
        )
        output = output if empty is None else output.masked_fill(empty, 0.0)
        return output.transpose(1, 2), None

    def _of_tokens(self, weights: Tensor, mask: Tensor | None, length: int) -> Tensor:
        """Weights of slots [B, H, T, N] -> of tokens [B, H, T, length]."""
        batch, slots = weights.shape[0], weights.shape[-1]
        place, real = torch.arange(length, device=weights.device)[None], None
        total = place.new_full((1, 1), length)
        if mask is not None:
            place, real, total = real_places(mask), mask, mask.sum(-1, keepdim=True)
        size = (total - place // self.factor * self.factor).clamp(1, self.factor)  # of a token's block
        slot = 1 + place // self.factor
        shared = weights.gather(-1, slot.clamp(max=slots - 1)[:, None, None].expand(batch, *weights.shape[1:3], -1))
        shared = (shared / size[:, None, None]).masked_fill((slot >= slots)[:, None, None], 0.0)
        if self.null is None:
            shared = shared + weights[..., :1] * (place == 0)[:, None, None]
        return shared if real is None else shared.masked_fill(~real[:, None, None], 0.0)

    # ------------------------------------------------------------------------------------------- generation

    def _reals(self, mask: Tensor | None, tokens: Tensor) -> Tensor:
        """[B]: real tokens among the current ones."""
        return tokens.new_full(tokens.shape[:1], tokens.shape[1], dtype=torch.long) if mask is None else mask.sum(-1)

    def _read_on(
        self, hidden_states: Tensor, mask: Tensor | None, layer: RecurrentStateLayer
    ) -> tuple[Tensor, Tensor]:
        """The slots after some more tokens. Rows complete blocks at different times: slots of a row stand in order,
        with room for those of a text without padding."""
        state, factor, length = layer.state, self.factor, hidden_states.shape[1]
        before, added = state["count"][:, 0], self._reals(mask, hidden_states)
        tokens = hidden_states if mask is None else _gathered(hidden_states, real_first(mask))
        held = before % factor
        # What is left of the text, and the new tokens right behind it.
        joined = torch.cat([state["tail"], tokens], dim=1)
        place = torch.arange(joined.shape[1], device=joined.device)
        source = torch.where(place < held[:, None], place, place - held[:, None] + factor - 1)
        joined = _gathered(joined, source.clamp(max=joined.shape[1] - 1))
        total = (held + added)[:, None]
        joined = joined.masked_fill((place >= total)[..., None], 0.0)
        blocks = self._blocks(joined[:, : joined.shape[1] // factor * factor], None)
        number = torch.arange(blocks.shape[1], device=joined.device)
        room = 1 + (layer.cumulative_length + length) // factor
        at = torch.where((number + 1) * factor <= total, number + 1 + (before // factor)[:, None], room)
        if self.null is None:  # a text that begins here
            begins = torch.where((before == 0) & (added > 0), 0, room)[:, None]
            at, blocks = torch.cat([begins, at], dim=1), torch.cat([joined[:, :1], blocks], dim=1)
        key, value = (
            _written(old, new, at, room)
            for old, new in zip((state["slot_keys"], state["slot_values"]), self._keys_and_values(blocks))
        )
        tail = _rows_from(joined, total[:, 0] // factor * factor, factor - 1)
        count = (before + added)[:, None]
        layer.advance(length, slot_keys=key, slot_values=value, tail=tail, count=count)
        return key, value


def _places(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """[B or 1, T]: how many real tokens stand before each one in this call; -1 where the first one is still to
    come."""
    if mask is None:
        return torch.arange(length, device=device)[None]
    return torch.where(from_first_real(mask), real_places(mask), -1)


def _gathered(tokens: Tensor, order: Tensor, mask: Tensor | None = None) -> Tensor:
    """tokens [B, S, D] in the order [B, n], with zeros where `mask` [B, S] has no real token."""
    found = tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))
    return found if mask is None else found.masked_fill(~mask.gather(1, order)[..., None], 0.0)


def _rows_from(tokens: Tensor, first: Tensor, count: int) -> Tensor:
    """tokens [B, S, D] -> `count` of them from the `first` [B] on; zeros beyond the last."""
    at = first[:, None] + torch.arange(count, device=tokens.device)
    beyond = at >= tokens.shape[1]
    return _gathered(tokens, at.clamp(max=tokens.shape[1] - 1)).masked_fill(beyond[..., None], 0.0)


def _written(old: Tensor, new: Tensor, at: Tensor, room: int) -> Tensor:
    """Slots [B, K, n, d] with new ones [B, K, m, d] at [B, m], `room` of them; those at `room` are dropped."""
    grown = F.pad(old, (0, 0, 0, room + 1 - old.shape[2]))
    return grown.scatter(2, at[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]), new)[:, :, :room]


@register("attention", "memory_compressed_attention", aliases=("memory_compressed",))
class MemoryCompressedSpec(AttentionSpec):
    """
    Args:
        layer_pattern: types of the layers from the first one on, local (L) and compressed (M), again from the start
            where there are more layers; cross-attention is always compressed.
        compression_factor: tokens of a slot.
        compress: how a slot is made of them, by a convolution over `conv`, their `mean` or their `max`.
        compress_activation: of what is made (`none` or `silu`).
        block_size: tokens of a block of local layers.
        local_lookback: whole blocks before its own that a token reads in local layers, in an encoder also after it
            (the paper's text: 0; its code: 1).
        first_slot: what a decoder can read before the first block is complete, the `first_token` or a learned vector
            (`null`).
    """

    summary = "local layers by turns with layers that read the whole text in slots of a few tokens"
    cross = True
    acts = frozenset()
    head_options = frozenset({"norm"})

    layer_pattern: str = "LM"
    compression_factor: int = bounded(3, least=1)
    compress: Literal["conv", "mean", "max"] = "conv"
    compress_activation: Literal["none", "silu"] = "none"
    block_size: int = bounded(256, "block", least=1)
    local_lookback: int = bounded(1, least=0)
    first_slot: Literal["first_token", "null"] = "first_token"

    def check_fields(self) -> None:
        if not self.layer_pattern or set(self.layer_pattern) - set("LM"):
            raise ValueError(
                f"{self.type} needs a `layer_pattern` of the letters L (local) and M (compressed), such as 'LM', got"
                f" {self.layer_pattern!r}."
            )

    def pattern(self, config, layer_idx: int) -> Pattern:
        """What local layers read."""
        after = 0 if config.is_decoder else self.local_lookback
        return patterns.block_local(self.block_size, self.local_lookback, after)

    def cache_layer(self, config, layer_idx: int = 0) -> MemoryCompressedState:
        return MemoryCompressedState(self.block_size * (self.local_lookback + 1) - 1)

    def weighs(self, config) -> bool:
        return self.first_slot != "null"

    def build(self, config, **where) -> Attention:
        kind = self.layer_pattern[where["layer_idx"] % len(self.layer_pattern)]
        made = CompressedAttention if kind == "M" or where.get("cross") else LocalBlockAttention
        return made(config, self, **where)
