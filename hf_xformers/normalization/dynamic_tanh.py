# SPDX-License-Identifier: Apache-2.0
"""Dynamic tanh (DyT): a squashing function in the place of a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.weight_decay import Undecayed
from .base import NormSpec


class DynamicTanh(Undecayed, nn.Module):
    """y = w tanh(alpha x) + b, alpha one learned number (Zhu et al. 2025, arXiv 2503.10622, eq. 1).

    There are no statistics: each number of a state is squashed by itself, [..., D] -> [..., D].
    """

    undecayed = ("alpha", "weight")

    def __init__(self, width: int, alpha: float, bias: bool):
        super().__init__()
        self.start = alpha
        self.alpha = nn.Parameter(torch.full((1,), float(alpha)))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def initialize(self, config, init) -> None:
        init.constant_(self.alpha, self.start)
        init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        squashed = torch.tanh(self.alpha * hidden_states) * self.weight
        return squashed if self.bias is None else squashed + self.bias


@register("normalization", "dynamic_tanh", aliases=("dyt",))
class DynamicTanhSpec(NormSpec):
    """alpha: the scale at the start. bias: whether there is b."""

    supports = frozenset({"context_parallel"})
    summary = "tanh with a learned scale in the place of a norm"

    alpha: float | int = bounded(0.5, above=0)
    bias: bool = True

    def build(self, config, **where) -> DynamicTanh:
        return DynamicTanh(where.get("width", config.hidden_size), self.alpha, self.bias)
