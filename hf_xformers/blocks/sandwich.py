# SPDX-License-Identifier: Apache-2.0
"""Sandwich order: attention first, feed-forward last."""

from __future__ import annotations

from ..core.components import register
from .base import BlockSpec, SublayerPlan


@register("block", "sandwich")
class SandwichBlockSpec(BlockSpec):
    """s^k (s f)^(n-k) f^k for n layers (Press et al. 2020, arXiv 1911.03864, section 4).

    The first k layers keep only their attention, and the last one takes the feed-forward sublayers they gave up; so
    every layer still has one attention, and parameters and cache are those of the vanilla order. Cross-attention
    follows each self-attention.

    coefficient: k, 0 <= k < layers (0: the vanilla order); `None`: 3/8 of the layers, the paper's best for 16.
    """

    supports = frozenset({"context_parallel", "packed_rows", "unpadding"})
    summary = "attention sublayers first, feed-forward sublayers last"

    coefficient: int | None = None

    def resolved(self, config) -> int:
        """k for this config."""
        return config.num_hidden_layers * 3 // 8 if self.coefficient is None else self.coefficient

    def check(self, config) -> None:
        if not 0 <= self.resolved(config) < max(config.num_hidden_layers, 1):
            raise ValueError(
                f"sandwich needs 0 <= `coefficient` < layers, got {self.coefficient} for {config.num_hidden_layers}"
                " layers."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        coefficient = self.resolved(config)
        sublayers = [SublayerPlan("attention", "attention")]
        if cross:
            sublayers.append(SublayerPlan("cross_attention", "cross_attention"))
        if layer_idx >= coefficient:
            sublayers.append(SublayerPlan("feedforward", "feedforward"))
        if layer_idx == config.num_hidden_layers - 1:
            sublayers += [SublayerPlan(f"feedforward_{i + 2}", "feedforward") for i in range(coefficient)]
        return sublayers
