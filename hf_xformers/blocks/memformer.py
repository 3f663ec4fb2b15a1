# SPDX-License-Identifier: Apache-2.0
"""Memformer's layer: tokens read the slots of a memory side by side."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import State
from .base import BlockSpec, SublayerPlan, XFormerLayer


class MemorySlots(State):
    """The slots of a memory besides the text, [B, k, D]."""

    states: Tensor


READING = "memory_reading"


class MemformerLayer(XFormerLayer):
    """A layer with cross-attention to memory slots, of which none is hidden."""

    def sublayers(self, memory: Tensor | None) -> list[SublayerPlan]:
        return [
            entry
            for entry in self.plan
            if entry.name == READING or entry.kind != "cross_attention" or memory is not None
        ]

    def run_entered(
        self,
        entry: SublayerPlan,
        entered: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        if entry.name != READING:
            return super().run_entered(entry, entered, context, memory, past_key_values, step)
        slots, context = context.given(MemorySlots).states, copy.copy(context)
        context.memory_padding_mask = None  # that of an encoder's text
        return super().run_entered(entry, entered, context, slots, None, step)


@register("block", "memformer")
class MemformerBlockSpec(BlockSpec):
    """Self-attention, then cross-attention to the memory's slots, then feed-forward (Wu et al. 2022, arXiv 2010.06891,
    section 3.3); a causal decoder reads the slots first, and an encoder-decoder's decoder, which has an encoder to
    read, reads none. The slots are read by the `cross_attention` component. Needs stack 'memformer'."""

    summary = "attention, reading of memory slots, feed-forward"
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "its stack reads states by row"}
    supports = frozenset()
    reads = frozenset({HandOver.SLOTS})

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        attention, feedforward = SublayerPlan("attention", "attention"), SublayerPlan("feedforward", "feedforward")
        if cross:
            return [attention, SublayerPlan("cross_attention", "cross_attention"), feedforward]
        reading = SublayerPlan(READING, "cross_attention")
        return [reading, attention, feedforward] if config.is_decoder else [attention, reading, feedforward]

    def build(self, config, **where) -> XFormerLayer:
        return (XFormerLayer if where.get("cross") else MemformerLayer)(config, self, **where)
