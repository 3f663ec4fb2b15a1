# SPDX-License-Identifier: Apache-2.0
"""Heads joined by routing-by-agreement (Li et al. 2019)."""

from __future__ import annotations

from typing import ClassVar, Literal

from .shared.head_parts import register_aggregation
from .shared.routed_heads import RoutedHeadsSpec


@register_aggregation("routing_aggregation")
class RoutingAggregationSpec(RoutedHeadsSpec):
    """Information aggregation by routing (Li, Yang, Dou, Wang, Lyu, Tu 2019, arXiv 1904.03100, section 3): in place of
    concatenation and the output projection, input capsules u_h = act(concat(o) F_h) of width D / H vote for output
    capsules, which side by side are the layer's output.

    Args:
        routing: `simple`, a mean of votes that weighs those that agree with it, or `em`, expectation maximization.
        iterations: of the routing.
        num_output_capsules: that `hidden_size` is divided among (`None`: as many as heads).
        activation: of the input capsules.
        em_lambda: inverse temperature of `em`.
        layers: that have it; the lower half gained most.
        final_linear: whether the output projection follows nonetheless.
    """

    mixes: ClassVar[bool] = True  # type: ignore[misc]

    routing: Literal["simple", "em"] = "simple"
    iterations: int = 3
    num_output_capsules: int | None = None
    activation: Literal["relu", "gelu", "tanh", "linear"] = "relu"
    em_lambda: float | int = 0.01
    layers: Literal["lower_half", "all"] | tuple[int, ...] = "lower_half"
    final_linear: bool = False
