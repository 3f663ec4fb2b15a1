# SPDX-License-Identifier: Apache-2.0
"""ScaleNorm: every vector gets the same learned length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import register
from ..core.weight_decay import Undecayed
from .base import NormSpec


class ScaleNorm(Undecayed, nn.Module):
    """y = g x / max(|x|, eps), g one learned scalar that starts at sqrt(width).

    Nguyen & Salazar 2019 (arXiv 1910.05895), eq. 4. A zero vector stays zero.
    """

    undecayed = ("weight",)

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), width**0.5))
        self.start, self.eps = width**0.5, eps

    def initialize(self, config, init) -> None:
        init.constant_(self.weight, self.start)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=self.eps)
        return (wide * (self.weight / length)).to(hidden_states.dtype)


@register("normalization", "scale_norm")
class ScaleNormSpec(NormSpec):
    """eps: the config's `layer_norm_eps`, a bound on the length."""

    supports = frozenset({"context_parallel"})
    summary = "one learned length for all vectors"

    def build(self, config, **where) -> ScaleNorm:
        return ScaleNorm(where.get("width", config.hidden_size), config.layer_norm_eps)
