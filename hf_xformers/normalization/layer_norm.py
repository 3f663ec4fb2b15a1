# SPDX-License-Identifier: Apache-2.0
"""Layer normalization and its variant without mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import register
from ..core.weight_decay import Undecayed
from ..ops.common.products import needs_room
from .base import NormSpec


@register("normalization", "layer_norm")
class LayerNormSpec(NormSpec):
    """y = g * (x - mean(x)) / sqrt(var(x) + eps) + b over the width (Ba et al. 2016, arXiv 1607.06450). bias:
    whether there is b. gain: whether there is g; without it there is no b either. eps: the config's
    `layer_norm_eps`."""

    supports = frozenset({"context_parallel"})
    summary = "mean and variance over the width"
    knows_heads = True

    bias: bool = True
    gain: bool = True

    def check_fields(self) -> None:
        if self.bias and not self.gain:
            raise ValueError(
                "layer_norm has no bias without a gain; set `bias` to False, too, or leave `gain` at True."
            )

    def build(self, config, **where) -> nn.LayerNorm:
        width = where.get("width", config.hidden_size)
        return nn.LayerNorm(width, eps=config.layer_norm_eps, elementwise_affine=self.gain, bias=self.bias)

    def build_for_heads(self, config, heads: int) -> HeadNorm:
        return HeadNorm(heads, config.head_width, config.layer_norm_eps, center=True)


class RMSNorm(Undecayed, nn.Module):
    """y = g * x / sqrt(mean(x^2) + eps), the mean square in float32 at least (Zhang & Sennrich 2019; T5's layer
    norm). from_zero: the parameter is g - 1 (Gemma)."""

    undecayed = ("weight",)

    def __init__(self, width: int, eps: float, from_zero: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if from_zero else torch.ones(width))
        self.eps, self.from_zero = eps, from_zero

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if hidden_states.dtype == weight.dtype and not needs_room(hidden_states):
            if self.from_zero:
                weight = 1.0 + weight
            return nn.functional.rms_norm(hidden_states, weight.shape, weight, self.eps)
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.from_zero:  # 1 + w would lose digits in half precision
            return (wide * scale * (1.0 + weight.to(wide.dtype))).to(hidden_states.dtype)
        return weight * (hidden_states * scale).to(self.weight.dtype)

    def initialize(self, config, init) -> None:
        init.constant_(self.weight, 0.0 if self.from_zero else 1.0)


class HeadNorm(Undecayed, nn.Module):
    """y_h = g_h * n(x_h) for the heads h of queries or keys, n the norm without gain and bias: as RMSNorm, or with
    `center` as layer normalization (StableLM 2, Command R+). In float32 at least."""

    undecayed = ("weight",)

    def __init__(self, heads: int, width: int, eps: float, center: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.eps, self.center = eps, center

    def forward(self, heads: Tensor) -> Tensor:
        """[..., heads, width] -> the same."""
        dtype = torch.promote_types(heads.dtype, torch.float32)
        norm = nn.functional.layer_norm if self.center else nn.functional.rms_norm
        normed = norm(heads.to(dtype), heads.shape[-1:], eps=self.eps)
        return (normed * self.weight.to(dtype)).to(heads.dtype)

    def initialize(self, config, init) -> None:
        init.ones_(self.weight)


@register("normalization", "rms_norm")
class RMSNormSpec(NormSpec):
    """from_zero: the weights are what is added to 1 (Gemma), so that weight decay leads to no weighting. eps: the
    config's `layer_norm_eps`."""

    supports = frozenset({"context_parallel"})
    summary = "root mean square over the width, no mean, no bias"
    knows_heads = True

    from_zero: bool = False

    def build(self, config, **where) -> RMSNorm:
        return RMSNorm(where.get("width", config.hidden_size), config.layer_norm_eps, self.from_zero)

    def build_for_heads(self, config, heads: int) -> HeadNorm:
        return HeadNorm(heads, config.head_width, config.layer_norm_eps, center=False)
