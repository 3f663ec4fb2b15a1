# SPDX-License-Identifier: Apache-2.0
"""Heads as capsules, joined by dynamic or EM routing (Gu & Feng 2019)."""

from __future__ import annotations

from typing import Literal

from .shared.head_parts import register_aggregation
from .shared.routed_heads import RoutedHeadsSpec


@register_aggregation("capsule_heads")
class CapsuleHeadsSpec(RoutedHeadsSpec):
    """Multi-head attention with capsule networks (Gu & Feng 2019, arXiv 1909.00188): what each head has read votes for
    output capsules, whose lengths routing keeps below one.

    Args:
        routing: `dynamic` (Sabour et al. 2017) or `em` (Hinton et al. 2018).
        iterations: of the routing.
        num_output_capsules: that the width of all heads is divided among (`None`: as many as heads).
        em_lambda: inverse temperature of `em`.
        layers: that have it.
        final_linear: whether the output projection follows; without it the output of a layer is bounded.
    """

    routing: Literal["dynamic", "em"] = "dynamic"
    iterations: int = 3
    num_output_capsules: int | None = None
    em_lambda: float | int = 0.01
    layers: Literal["lower_half", "all"] | tuple[int, ...] = "all"
    final_linear: bool = True
