# SPDX-License-Identifier: Apache-2.0
"""Macaron layers: attention between two half feed-forward steps."""

from __future__ import annotations

from ..core.components import register
from .base import BlockSpec, SublayerPlan


@register("block", "macaron")
class MacaronBlockSpec(BlockSpec):
    """x += s FF1(x); x += SA(x); [x += XA(x)]; x += s FF2(x) (Lu et al. 2019, arXiv 1906.02762, section 4).

    residual_scale: s. inner_scale: each feed-forward's part of `intermediate_size` (1/2 keeps the parameter count).
    """

    supports = frozenset({"context_parallel", "packed_rows", "unpadding"})
    summary = "attention between two half feed-forward steps"

    residual_scale: float | int = 0.5
    inner_scale: float | int = 0.5

    def check(self, config) -> None:
        if int(config.intermediate_size * self.inner_scale) < 1:
            raise ValueError(
                f"macaron gives each feed-forward {self.inner_scale} of `intermediate_size`"
                f" {config.intermediate_size}, which is less than 1; enlarge one of them."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        first, second = (
            SublayerPlan(name, "feedforward", residual_scale=self.residual_scale, inner_scale=self.inner_scale)
            for name in ("feedforward", "feedforward_2")
        )
        return [first, SublayerPlan("attention", "attention"), *reading, second]
