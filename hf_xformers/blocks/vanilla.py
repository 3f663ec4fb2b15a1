# SPDX-License-Identifier: Apache-2.0
"""The vanilla order of sublayers."""

from __future__ import annotations

from ..core.components import register
from .base import BlockSpec, SublayerPlan


@register("block", "vanilla")
class VanillaBlockSpec(BlockSpec):
    """Self-attention, cross-attention in a decoder with a memory, feed-forward (Vaswani et al. 2017, section 3.1)."""

    supports = frozenset({"context_parallel", "packed_rows", "unpadding"})
    summary = "attention, (cross-attention,) feed-forward"

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        return [SublayerPlan("attention", "attention"), *reading, SublayerPlan("feedforward", "feedforward")]
