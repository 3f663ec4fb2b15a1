# SPDX-License-Identifier: Apache-2.0
"""Hard-coded Gaussian attention: weights are fixed numbers by distance, without queries and keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer, SlotStateLayer
from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..core.visibility import visible_pairs
from ..ops.common.constants import constant
from ..ops.common.real_tokens import real_first, real_places
from ..ops.common.segments import accumulation_dtype
from ..ops.head_convolution import LEAST_TAPS, convolve_heads
from .shared.base import Attention, cross_cache, given_memory
from .shared.linear import state_layer
from .shared.spec import AttentionSpec
from .shared.unread_input import check_unread_input, reads_memory

# Beyond so many standard deviations a density is left out: exp(-32) is below what float64 keeps next to 1.
REACH = 8.0
# Queries that read one window of a memory together.
BLOCK = 64


class HardCodedGaussianAttention(Attention):
    """o_i = sum_j exp(-(j - i - o_h)^2 / (2 s^2)) / (s sqrt(2 pi)) v_j over the j that i may see.

    You, Sun and Iyyer 2020 (arXiv 2005.00742), section 3: head h looks at the token at offset o_h and its neighbors,
    with the density itself for a weight. Nothing is divided by a sum (released code), so that weights near the ends of
    a text, and those of a decoder, sum to less than one; with `renormalize` they are divided by their sum over what
    may be seen. There are no queries and keys, and 2 D^2 parameters less.

    In cross-attention the center is r p_i + o_h with p_i the place of the token in its text and r = `ratio`, a
    constant for the ratio of the lengths of source and target (section 4): the target's own length is not known while
    it is made. Places of source and target are counted from their first real tokens.

    Densities beyond 8 s are left out, which changes no digit. Then this is a convolution of the values with one kernel
    for each head, W = 2 (8 s + max |o|) + 1 taps: time O(T W D), memory O(T D). State: the last (W - 1) / 2 values.
    `attention_probs_dropout_prob` has no effect, as nothing is normalized over the weights.
    """

    spec: HardCodedGaussianSpec

    def __init__(self, config, spec: HardCodedGaussianSpec, **where):
        super().__init__(config, spec, **where)
        self.q_proj = self.k_proj = None  # type: ignore[assignment]
        self.q_norm = self.k_norm = None
        chosen = spec.offsets_of(self.is_causal, self.cross)
        self.head_offsets = [chosen[head % len(chosen)] for head in range(self.num_heads)]
        self.reach = spec.reach(self.is_causal)

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(self.v_proj,), output=self.o_proj)

    # ------------------------------------------------------------------------------------------------ densities

    def _offsets(self, like: Tensor) -> Tensor:
        """[H], in float32 at least."""
        return constant(self.head_offsets, like.device, accumulation_dtype(like.dtype))

    def _density(self, away: Tensor) -> Tensor:
        """exp(-x^2 / (2 s^2)) / (s sqrt(2 pi)) of distances x from a center."""
        std = float(self.spec.std)
        return torch.exp(-0.5 * (away / std).square()) / (std * math.sqrt(2 * math.pi))

    def _kernel(self, like: Tensor, reach: int) -> Tensor:
        """[H, 2 reach + 1]: the density at the distances from -reach to reach; later tokens have none in a decoder."""
        offsets = self._offsets(like)
        distance = torch.arange(-reach, reach + 1, device=like.device)
        kernel = self._density(distance.to(offsets.dtype) - offsets[:, None])
        kernel = kernel * (distance.abs() <= self.reach)
        return kernel * (distance <= 0) if self.is_causal else kernel

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
        if self.cross:
            output, weights = self._cross(hidden_states, memory, context, past_key_values, step)
        else:
            output, weights = self._self(hidden_states, context, past_key_values, step)
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return SublayerOutput(self.o_proj(output), weights)

    def _self(
        self, hidden_states: Tensor, context: Call, past: Cache | None, step: int
    ) -> tuple[Tensor, Tensor | None]:
        """Output [B, H, T, d], and weights [B, H, T, S] where they are wanted."""
        layer, mask = state_layer(past, step), context.query_padding_mask
        value = self.heads(self.v_proj(hidden_states))
        real = value.new_ones(value.shape[0], value.shape[2]) if mask is None else mask.to(value.dtype)
        if mask is not None:
            value = value * real[:, None, :, None]
        before = 0
        if layer is not None:
            if layer.state:
                value = torch.cat((layer.state["values"], value), dim=2)
                real = torch.cat((layer.state["real"], real), dim=1)
                before = layer.state["values"].shape[2]
            kept = max(value.shape[2] - self.reach, 0)
            tokens = value.shape[2] - before
            layer.advance(tokens, values=value[:, :, kept:], real=real[:, kept:])
        value, weights = self.repeated(value), None
        if self.wants_weights(context):
            weights = self._matrix(value, context)
            if before == 0:
                return torch.matmul(weights, value), weights.expand(value.shape[0], -1, -1, -1)
            weights = weights.expand(value.shape[0], -1, -1, -1)
        if not self.spec.renormalize:
            return self._convolved(value)[:, :, before:], weights
        wide = accumulation_dtype(value.dtype)  # densities at the ends of a text may be below what float16 holds
        sums = real.to(wide)[: 1 if mask is None and not before else None, None, :, None]
        sums = self._convolved(sums.expand(-1, self.num_heads, -1, -1))
        output = torch.where(sums > 0, self._convolved(value.to(wide)) / sums.masked_fill(sums <= 0, 1.0), 0.0)
        return output[:, :, before:].to(value.dtype), weights

    def _convolved(self, value: Tensor) -> Tensor:
        """value [B, H, T, d] -> the sums [B, H, T, d]."""
        # A kernel with zeros around it, where that makes it one that products of matrices compute.
        reach = max(self.reach, LEAST_TAPS // 2) if value.shape[2] > LEAST_TAPS else self.reach
        return convolve_heads(value, self._kernel(value, reach).to(value.dtype))

    def _matrix(self, value: Tensor, context: Call) -> Tensor:
        """The weights of all pairs, [B or 1, H, T, S]."""
        offsets = self._offsets(value)[:, None, None]
        distance = context.key_index[None, :] - context.query_index[:, None]
        return self._weights((distance.to(offsets.dtype) - offsets)[None], visible_pairs(context)).to(value.dtype)

    def _weights(self, away: Tensor, seen: Tensor | None) -> Tensor:
        """Of keys at distances `away` [..., S] from a center, of which `seen` (None: all) may be seen."""
        if not self.spec.renormalize:
            weights = self._density(away)
            return weights if seen is None else weights * seen
        # A softmax: far from all keys every density is zero in floating point, and their ratios are not.
        exponents = -0.5 * (away / float(self.spec.std)).square()
        if seen is None:
            return exponents.softmax(-1)
        lowest = torch.finfo(exponents.dtype).min
        return exponents.masked_fill(~seen, lowest).softmax(-1).masked_fill(~seen, 0.0)

    # ------------------------------------------------------------------------------------------------ cross-attention

    def _cross(
        self, hidden_states: Tensor, memory: Tensor | None, context: Call, past: Cache | None, step: int
    ) -> tuple[Tensor, Tensor | None]:
        value, mask = self._memory_values(memory, past, step), context.memory_padding_mask
        value = self.repeated(value)
        padding = context.padding_mask
        places = context.query_index[None] if padding is None else real_places(padding)[:, context.query_index]
        offsets = self._offsets(value)
        centres = self.spec.ratio * places.to(offsets.dtype)  # [B or 1, T]
        if self.wants_weights(context):
            slots = torch.arange(value.shape[2], device=value.device)[None] if mask is None else real_places(mask)
            away = slots[:, None, None, :] - centres[:, None, :, None] - offsets[:, None, None]
            weights = self._weights(away, None if mask is None else mask[:, None, None, :])
            weights = weights.to(value.dtype).expand(value.shape[0], -1, -1, -1)
            return torch.matmul(weights, value), weights
        count = None
        if mask is not None:
            order = real_first(mask)[:, None, :, None]
            value, count = value.gather(2, order.expand(-1, *value.shape[1:2], -1, value.shape[3])), mask.sum(-1)
        return self._windows(value, centres, offsets, count), None

    def _memory_values(self, memory: Tensor | None, past: Cache | None, step: int) -> Tensor:
        """[B, K, S, d] of the memory, made once per generated text."""
        cache = cross_cache(past)
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            return layer.values
        value = self.heads(self.v_proj(given_memory(memory)))
        if cache is not None:  # a cache counts its tokens by the keys: one number stands for each
            value = cache.cross_attention_cache.update(value[..., :1], value, step)[1]
            cache.is_updated[step] = True
        return value

    def _windows(self, value: Tensor, centres: Tensor, offsets: Tensor, count: Tensor | None) -> Tensor:
        """Blocks of queries, each with the part of the memory [B, H, S, d] around its centers [B or 1, T]; count [B]:
        real tokens, which come first -> [B, H, T, d]."""
        (batch, _, keys, width), length = value.shape, centres.shape[1]
        block = min(BLOCK, length)
        centres = F.pad(centres[:, None], (0, -length % block), mode="replicate")[:, 0].unflatten(1, (-1, block))
        low, high = min(self.head_offsets), max(self.head_offsets)
        near = math.ceil(REACH * float(self.spec.std)) + 1
        first = (centres[..., 0] + low).floor().long() - near  # [B or 1, n]
        span = math.ceil(float(self.spec.ratio) * (block - 1)) + math.ceil(high - low) + 2 * near + 2
        last = first.new_tensor(keys) if count is None else count[:, None]  # the first slot behind the memory
        if self.spec.renormalize:  # what looks beyond an end of the memory reads what is nearest to it
            first = torch.minimum(first, last - span).clamp(min=0)
        slots = first[..., None] + torch.arange(span, device=value.device)  # [B or 1, n, span]
        seen = (slots >= 0) & (slots < last[..., None])
        away = slots[:, None, :, None, :] - centres[:, None, :, :, None] - offsets[:, None, None, None]
        weights = self._weights(away, seen[:, None, :, None])  # [B or 1, H, n, block, span]
        at = slots.clamp(0, keys - 1)
        if at.shape[0] == 1:
            windows = value.index_select(2, at.flatten()).unflatten(2, at.shape[1:])
        else:
            index = at[:, None].flatten(2)[..., None].expand(-1, value.shape[1], -1, width)
            windows = value.gather(2, index).unflatten(2, at.shape[1:])
        output = torch.matmul(weights.to(value.dtype), windows).flatten(2, 3)
        return output[:, :, :length].expand(batch, -1, -1, -1)


@register("attention", "hard_coded_gaussian")
class HardCodedGaussianSpec(AttentionSpec):
    """
    Args:
        offsets: where heads look, in tokens from their own, given to the heads by turns (`None`: the tokens before and
            after in an encoder, the token before and the token itself in a decoder, those before, at and after the
            place in cross-attention).
        std: s, standard deviation in tokens.
        renormalize: whether weights are divided by their sum over what may be seen.
        ratio: r of cross-attention, tokens of the source for one of the target.
    """

    not_taken_over = ("scale",)  # there are no scores
    summary = "fixed Gaussian weights around a neighbor: no queries and keys, linear time, constant state"
    cross = True
    acts = frozenset()
    knows_order = True

    offsets: tuple[int, ...] | None = None
    std: float | int = bounded(1.0, above=0)
    renormalize: bool = False
    ratio: float | int = bounded(1.0, above=0)

    def offsets_of(self, causal: bool, cross: bool = False) -> tuple[int, ...]:
        if self.offsets is not None:
            return tuple(self.offsets)
        if cross:
            return (-1, 0, 1)
        return (-1, 0) if causal else (-1, 1)

    def reach(self, causal: bool) -> int:
        """Tokens to either side that have a weight."""
        return math.ceil(REACH * float(self.std)) + max(abs(offset) for offset in self.offsets_of(causal))

    def check_fields(self) -> None:
        if self.scale is not None:
            raise ValueError(
                f"hard_coded_gaussian has no scores to scale, got `scale={self.scale}`; leave it unset (None)."
            )
        if self.offsets is not None and not self.offsets:
            raise ValueError(
                "hard_coded_gaussian needs at least one number in `offsets`, got none; leave it out for the paper's."
            )
        farthest = max((abs(offset) for offset in self.offsets or ()), default=0)
        if self.renormalize and farthest > 12 * self.std:
            raise ValueError(
                f"hard_coded_gaussian with `renormalize=True` cannot divide by weights that vanish: an offset of"
                f" {farthest} tokens is more than 12 times `std` {self.std}; set a larger `std` or a smaller offset."
            )

    def check(self, config) -> None:
        if reads_memory(self, config):
            check_unread_input(config, "hard_coded_gaussian as `cross_attention` reads the memory by places")
        for slot, causal in (("attention", config.is_decoder), ("cross_attention", False)):
            if getattr(config, slot) is not self or self.offsets is None:
                continue
            if config.num_attention_heads % len(self.offsets):
                raise ValueError(
                    f"hard_coded_gaussian gives {len(self.offsets)} `offsets` to heads by turns, which must divide"
                    f" `num_attention_heads` {config.num_attention_heads}."
                )
            if causal and min(self.offsets) > 0:
                raise ValueError(
                    f"hard_coded_gaussian in a decoder sees no later token, but all `offsets` {list(self.offsets)} are"
                    " later ones; give one that is 0 or less."
                )

    def weighs(self, config) -> bool:
        return self.renormalize

    def projects_keys(self, config) -> bool:
        return False

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        return SlotStateLayer()

    def build(self, config, **where) -> HardCodedGaussianAttention:
        return HardCodedGaussianAttention(config, self, **where)
