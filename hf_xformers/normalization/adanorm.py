# SPDX-License-Identifier: Apache-2.0
"""AdaNorm: layer normalization whose scale depends on the normalized vector, not on parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.components import bounded, register
from .base import NormSpec


class AdaNorm(nn.Module):
    """z = C (1 - k y) y with y = (x - mean) / sqrt(var + eps) over the width; the factor C (1 - k y) is a constant in
    the backward pass.

    Xu et al. 2019 (arXiv 1911.07013), eq. 7. No parameters. The variance is the biased one, eps inside the root.
    """

    def __init__(self, k: float, scale: float, eps: float):
        super().__init__()
        self.k, self.scale, self.eps = k, scale, eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        normal = F.layer_norm(hidden_states, hidden_states.shape[-1:], eps=self.eps)
        return self.scale * (1 - self.k * normal.detach()) * normal


@register("normalization", "adanorm")
class AdaNormSpec(NormSpec):
    """k: how fast the scale falls with the normalized value. scale: C, tuned by the paper between 0.3 and 2. eps: the
    config's `layer_norm_eps`."""

    summary = "layer norm with a scale that adapts to the input, no parameters"

    k: float | int = bounded(0.1, least=0, below=1)
    scale: float | int = bounded(1.0, above=0)

    def build(self, config, **where) -> AdaNorm:
        return AdaNorm(self.k, self.scale, config.layer_norm_eps)
