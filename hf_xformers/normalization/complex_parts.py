# SPDX-License-Identifier: Apache-2.0
"""Layer norm of complex states: real and imaginary parts each for themselves."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.components import register
from .base import NormSpec


class PartsNorm(nn.Module):
    """The same layer norm on each half of the width (Wang et al. 2020, arXiv 1912.12333, released code)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.norm = nn.LayerNorm(width // 2, eps=eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states.unflatten(-1, (2, -1))).flatten(-2)


@register("normalization", "complex_parts")
class PartsNormSpec(NormSpec):
    """eps: the config's `layer_norm_eps`."""

    any_width = False
    summary = "layer norm on real and imaginary parts each"

    def check(self, config) -> None:
        if config.hidden_size % 2:
            raise ValueError(f"complex_parts needs an even `hidden_size` (two parts), got {config.hidden_size}.")

    def build(self, config, **where) -> PartsNorm:
        return PartsNorm(where.get("width", config.hidden_size), config.layer_norm_eps)
