"""Rotary positions (RoPE)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.components import register
from .base import Position, PositionSpec, Rotation


class RotaryTables(Rotation):
    """Cosines and sines [B or 1, 1, T, r] for one set of positions; calling it rotates [B, H, T, d] (r <= d)."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool, values: bool = False):
        self.cos, self.sin, self.interleaved, self.values = cos, sin, interleaved, values

    def __call__(self, heads: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        turned, rest = (heads, None) if width == heads.shape[-1] else (heads[..., :width], heads[..., width:])
        if self.interleaved:
            swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            swapped = torch.cat((-second, first), dim=-1)
        turned = turned * self.cos + swapped * self.sin
        return turned if rest is None else torch.cat((turned, rest), dim=-1)


class RotaryPosition(Position):
    """Su et al. 2021 (arXiv 2104.09864), eq. 34: each pair of channels of q and k turns by position * theta^(-2i/r),
    so that a score depends on the distance only. `interleaved` pairs neighbouring channels (the paper, RoFormer);
    `half` pairs channel i with i + r/2 (LLaMA and most current models)."""

    def __init__(self, width: int, spec: RotarySpec):
        super().__init__()
        self.width, self.spec = width, spec

    def rotation(self, positions: Tensor, like: Tensor) -> Rotation:
        # Angles in float32: in bfloat16 neighbouring positions beyond 256 would collapse.
        exponent = torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float32) / self.width
        frequency = torch.pow(torch.tensor(float(self.spec.theta), device=exponent.device), -exponent)
        angles = positions.to(torch.float32).unsqueeze(-1) * frequency
        interleaved = self.spec.layout == "interleaved"
        angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
        angles = angles.unsqueeze(1)
        return RotaryTables(angles.cos().to(like.dtype), angles.sin().to(like.dtype), interleaved, self.spec.values)


@register("position", "rotary", aliases=("roformer", "rope"))
class RotarySpec(PositionSpec):
    """theta: base of the frequencies. fraction: part of each head's width that is rotated. layout: which channels
    pair. values: rotate the values as well (the released RoFormer's `rotary_value`), with dense attention."""

    context_parallel = True
    summary = "queries and keys rotated by their position"
    acts = frozenset({"rotation"})

    theta: float | int = 10000.0
    fraction: float | int = 1.0
    layout: Literal["interleaved", "half"] = "half"
    values: bool = False

    def check_fields(self) -> None:
        if self.theta <= 1:
            raise ValueError(f"rotary needs `theta` > 1, got {self.theta}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rotary needs `fraction` in (0, 1], got {self.fraction}.")

    def _width(self, config) -> int:
        return int(config.head_width * self.fraction)

    def check(self, config) -> None:
        if self._width(config) % 2 or self._width(config) == 0:
            raise ValueError(
                f"rotary turns pairs of channels, but {self.fraction} of head width {config.head_width} is "
                f"{self._width(config)}; choose an even rotated width."
            )

        if self.values and not config.attention.rotates_values:
            raise ValueError(
                f"rotary with `values` rotates what dense attention sums, which attention {config.attention.type!r}"
                " does not; leave `values` at False."
            )

    def build(self, config, **where) -> RotaryPosition:
        return RotaryPosition(self._width(config), self)
