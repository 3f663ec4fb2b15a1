# SPDX-License-Identifier: Apache-2.0
"""The Compressive Transformer's stack: what leaves the segment memory is compressed instead of forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..attention.shared.query_grid import KeyUsage
from ..blocks.base import XFormerLayer
from ..compat import named_parameters_of, parameters_of
from ..core.call import Call
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.segment_memory import CompressiveMemory, MemoryCacheLayer, MemoryLayout, SegmentMemory, take_slots
from ..ops.common.fused import fused_attention
from .segment_recurrent import SegmentRecurrentSpec, SegmentRecurrentStack


class Compression(nn.Module):
    """f_c of one layer: `rate` states to one slot (Rae et al. 2020, section 3.1), and the g that gives them back,
    where it learns by auto-encoding.

    A dilated convolution takes every second of 2 `rate` - 1 states: those of its slot and those of the slot before, as
    far as they leave the memory together (zeros stand for the others).
    """

    def __init__(self, config, spec: CompressiveSpec):
        super().__init__()
        self.kind, self.rate = spec.compression, spec.compression_rate
        width = config.hidden_size
        self.conv: nn.Conv1d | None = None
        if spec.learns:
            dilation = 2 if self.kind == "dilated" else 1
            self.conv = nn.Conv1d(width, width, self.rate, stride=self.rate, dilation=dilation)
        self.decoder: nn.ConvTranspose1d | None = None
        if spec.learns and spec.reconstruction == "autoencode":
            self.decoder = nn.ConvTranspose1d(width, width, self.rate, stride=self.rate)

    def forward(self, states: Tensor, mask: Tensor | None, usage: Tensor | None) -> Tensor:
        """states [B, n * rate, D], real where `mask` [B, n * rate], per row a multiple of `rate` at the end; usage
        [B, n * rate] -> [B, n, D], per row as many real slots at the end."""
        if self.conv is not None:
            if self.kind == "dilated":
                states = states if mask is None else states.masked_fill(~mask[..., None], 0.0)
                states = F.pad(states, (0, 0, self.rate - 1, 0))
            return self.conv(states.transpose(1, 2)).transpose(1, 2)
        if self.kind == "most_used" and usage is not None:
            return take_slots(states, self.most_used(usage, mask))
        grouped = states.unflatten(1, (-1, self.rate))
        return grouped.mean(2) if self.kind == "mean" else grouped.amax(2)

    def restored(self, slots: Tensor) -> Tensor:
        """slots [B, n, D] -> g(slots) [B, n * rate, D]. Raises `ValueError` where nothing learns by auto-encoding."""
        if self.decoder is None:
            raise ValueError("This compression has no decoder; set `reconstruction='autoencode'`.")
        return self.decoder(slots.transpose(1, 2)).transpose(1, 2)

    def most_used(self, usage: Tensor, mask: Tensor | None) -> Tensor:
        """Places [B, n] of the row's most used states, in the order of the text: one in `rate` of its real ones."""
        real = torch.ones_like(usage, dtype=torch.bool) if mask is None else mask
        count = usage.shape[1] // self.rate
        rank = usage.masked_fill(~real, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        chosen = rank < real.sum(1, keepdim=True) // self.rate
        return chosen.to(torch.uint8).argsort(dim=1, stable=True)[:, usage.shape[1] - count :]


class _ContentAttention(nn.Module):
    """attn(h, m): a layer's attention by content alone, up to the output projection."""

    def __init__(self, layer: Any):
        super().__init__()
        entry = next(entry for entry in layer.plan if entry.kind == "attention")
        self.attention, self.frame = layer.function(entry), layer.frame(entry)

    def forward(self, states: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """states [B, T, D], memory [B, n, D], mask [B, n] with at least one True per row -> [B, H, T, d]."""
        attention = self.attention
        memory = self.frame.enter(memory)
        query = attention.heads(attention.q_proj(self.frame.enter(states)))
        key, value = attention.heads(attention.k_proj(memory)), attention.heads(attention.v_proj(memory))
        if attention.num_key_value_groups > 1:
            key, value = (x.repeat_interleave(attention.num_key_value_groups, dim=1) for x in (key, value))
        mask = mask[:, None, None].expand(-1, -1, query.shape[2], -1)
        return fused_attention(query, key, value, attn_mask=mask, scale=attention.scaling)


class CompressiveStack(SegmentRecurrentStack):
    """m <- the last n_m states of [m ; h]; c <- the last n_cm of [c ; f_c(SG(old))], with `old` the states that left
    m; every layer reads [c ; m ; h] (Rae et al. 2020, arXiv 1911.05507, section 3, algorithm 1).

    States leave in whole groups of `compression_rate`, the oldest first, so up to rate - 1 more than n_m wait in m and
    no state is lost, whatever the segments' lengths and each row's padding.

    A convolution learns from the attention-reconstruction loss alone (algorithm 2): per layer the mean over tokens and
    channels of (attn(h, old) - attn(h, f_c(old)))^2, with attention by content, and with h, old and the layer's
    parameters held constant; or from the auto-encoding loss, the mean of (old - g(f_c(old)))^2 with a g of its own. No
    other loss reaches it.

    A generation cache is the memory itself (each call is a segment), in hidden states: a step projects them anew,
    which costs (n_cm + n_m) D^2 per layer.
    """

    spec: CompressiveSpec

    def __init__(self, config, spec: CompressiveSpec):
        super().__init__(config, spec)
        self.compressed_length = spec.compressed(config)
        self.compressions = nn.ModuleList(Compression(config, spec) for _ in range(config.num_hidden_layers))

    def begin(self, context: Call) -> None:
        if self.spec.compression == "most_used":
            context.keep(KeyUsage({}))

    def slot(self, cache: Cache | None) -> MemoryCacheLayer | None:
        if cache is None:
            return None
        slot = cache.layers[0] if cache.layers else None
        if not isinstance(slot, MemoryCacheLayer):
            raise ValueError(
                f"The compressive stack generates from its memory, which a {type(cache).__name__} has no place for;"
                " leave `past_key_values` out, or make it with `hf_xformers.core.cache.make_cache(config)`."
            )
        return slot

    def remember(
        self, layers: Sequence[XFormerLayer], carried: SegmentMemory, inputs: Sequence[Tensor], context: Call
    ) -> tuple[SegmentMemory, dict[str, Tensor]]:
        if not isinstance(carried, CompressiveMemory):
            raise TypeError(f"The compressive stack needs a CompressiveMemory, got {type(carried).__name__}.")
        received = self.received(carried, inputs, context)
        rate = self.spec.compression_rate
        kept, old = carried.evict(inputs, context.query_padding_mask, self.memory_length, rate, received)
        learns = torch.is_grad_enabled() and self.spec.learns and self.spec.reconstruction_weight > 0
        losses: list[Tensor] = []
        if old.length:
            slots = []
            for step, (compress, layer) in enumerate(zip(self.compressions, layers, strict=True)):
                usage = old.usage[step] if old.usage else None
                slots.append(compress(old.states[step], old.mask, usage))
                if learns and self.spec.reconstruction == "autoencode":
                    losses.append(self.autoencoding(compress, old, step, slots[-1]))
                elif learns:
                    losses.append(self.reconstruction(layer, inputs[step], old, step, slots[-1], context))
            mask = None if old.mask is None else old.mask[:, ::rate]
            kept = kept.push(slots, mask, self.compressed_length)
        elif learns:  # nothing left the memory yet; parameters that take no part would puzzle distributed training
            losses = [torch.stack([0.0 * parameter.sum() for parameter in parameters_of(self.compressions)]).sum()]
        total = {"reconstruction": self.spec.reconstruction_weight * torch.stack(losses).sum()} if losses else {}
        return kept, total

    def received(self, carried: CompressiveMemory, inputs: Sequence[Tensor], context: Call) -> list[Tensor]:
        """The attention that every state of [m ; h] got in this segment, one [B, M + T] per step; empty if not
        counted."""
        usage, order = context.find(KeyUsage), MemoryLayout.of(context).order
        if usage is None:
            return []
        found = [usage.by_step[step] for step in range(len(inputs))]
        if order is not None:
            found = [torch.zeros_like(got).scatter(1, order, got) for got in found]
        return [got[:, carried.compressed_length :] for got in found]

    def autoencoding(self, compress: Any, old: CompressiveMemory, step: int, slots: Tensor) -> Tensor:
        """The mean over real states and channels of (old - g(f_c(old)))^2 for one layer, a scalar."""
        states = old.states[step]
        error = (compress.restored(slots) - states).float().pow(2).mean(-1)
        weight = torch.ones_like(error) if old.mask is None else old.mask.to(error.dtype)
        return (error * weight).sum() / weight.sum().clamp(min=1)

    def reconstruction(
        self, layer: nn.Module, states: Tensor, old: CompressiveMemory, step: int, slots: Tensor, context: Call
    ) -> Tensor:
        """Algorithm 2 for one layer, a scalar."""
        module = _ContentAttention(layer)
        constant = {name: parameter.detach() for name, parameter in named_parameters_of(module).items()}
        states, real = states.detach(), context.query_padding_mask
        before = old.mask if old.mask is not None else states.new_ones(old.states[0].shape[:2], dtype=torch.bool)
        rows = before.any(1)
        weight = rows[:, None].expand(-1, states.shape[1]) if real is None else rows[:, None] & real
        before = before | ~rows[:, None]  # rows that compress nothing yet: anything, it has no weight
        with torch.no_grad():
            target = functional_call(module, constant, (states, old.states[step], before))
        found = functional_call(module, constant, (states, slots, before[:, :: self.spec.compression_rate]))
        error = (found - target).float().pow(2).mean((1, 3))
        return (error * weight).sum() / weight.sum().clamp(min=1)


@register("stack", "compressive")
class CompressiveSpec(SegmentRecurrentSpec):
    """
    Args:
        memory_length: states that stay as they are, n_m (`None`: `max_position_embeddings`).
        compressed_length: compressed slots after that, n_cm (`None`: as many).
        compression_rate: states to a slot.
        compression: `conv` (a convolution of kernel and stride `compression_rate`, the paper's best), `dilated` (one
            that also reaches into the slot before), `mean` or `max` pooling, or `most_used` (the states that got the
            most attention so far).
        reconstruction: the loss that teaches a convolution, of what attention reads (`attention`) or of the states
            themselves (`autoencode`).
        reconstruction_weight: factor on it.
    """

    summary = "segment memory whose oldest states are compressed"

    compressed_length: int | None = bounded(None, least=0)
    compression_rate: int = bounded(3, least=1)
    compression: Literal["conv", "dilated", "mean", "max", "most_used"] = "conv"
    reconstruction: Literal["attention", "autoencode"] = "attention"
    reconstruction_weight: float | int = bounded(1.0, least=0)

    @property
    def learns(self) -> bool:
        """Whether the compression has parameters."""
        return self.compression in ("conv", "dilated")

    def compressed(self, config) -> int:
        """n_cm (slots)."""
        return self.length(config) if self.compressed_length is None else self.compressed_length

    def memory_slots(self, config) -> int:
        return self.length(config) + self.compressed(config)

    def cache_layer(self, config, step: int) -> MemoryCacheLayer:
        """The state of generation, whatever the attention."""
        return MemoryCacheLayer()

    def remembers_parts(self, config) -> bool:
        return False  # what is compressed depends on the segments before, one after the other

    def empty(self) -> CompressiveMemory:
        return CompressiveMemory()

    def check_fields(self) -> None:
        for name, usual in (("recurrence", "shift_down"), ("retrospective", None)):
            if getattr(self, name) not in (usual, False):
                raise ValueError(
                    f"compressive compresses what went into layers in text that is read once, so it has no"
                    f" `{name}={getattr(self, name)!r}`; leave it out, or use the stack 'segment_recurrent'."
                )
        if self.learns and self.reconstruction_weight == 0:
            raise ValueError(
                "compressive's convolution learns from the reconstruction loss alone, so `reconstruction_weight` must"
                " be above 0; for a compression that learns nothing use 'mean' or 'max'."
            )

    def check(self, config) -> None:
        super().check(config)
        if self.compression == "most_used" and HandOver.KEY_USAGE not in config.attention.reads:
            raise ValueError(
                f"compressive's 'most_used' asks how much attention each state gets, which attention"
                f" {config.attention.type!r} does not tell; use attention 'transformer_xl', or another `compression`."
            )

    def build(self, config, **where) -> CompressiveStack:
        self.refuse_two_towers(config)
        return CompressiveStack(config, self)
