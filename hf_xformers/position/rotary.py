# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoPE)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.components import bounded, register
from .base import Position, PositionSpec, Rotation
from .rotary_scaling import RotaryScaling, both_ways, build_scaling, known_frequencies


class RotaryTables(Rotation):
    """Cosines and sines [B or 1, 1, T, r] for one set of positions; calling it rotates [B, H, T, d] (r <= d). A pair
    (a, b) becomes (a, b) cos + (b, a) (-sin, sin): `sin` has these signs, so that no head has to be negated."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool, values: bool = False, by_length: bool = False):
        self.cos, self.sin, self.interleaved = cos, sin, interleaved
        self.values, self.by_length = values, by_length

    def of_last(self, count: int) -> RotaryTables:
        if count == self.cos.shape[2]:
            return self
        cos, sin = self.cos[:, :, -count:], self.sin[:, :, -count:]
        return RotaryTables(cos, sin, self.interleaved, self.values, self.by_length)

    def __call__(self, heads: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        turned, rest = (heads, None) if width == heads.shape[-1] else (heads[..., :width], heads[..., width:])
        if self.interleaved:
            swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = turned.roll(width // 2, dims=-1)
        turned = torch.addcmul(turned * self.cos, swapped, self.sin)
        return turned if rest is None else torch.cat((turned, rest), dim=-1)


class RotaryPosition(Position):
    """Su et al. 2021 (arXiv 2104.09864), eq. 34: each pair of channels of q and k turns by position * theta^(-2i/r),
    so that a score depends on the distance only. `interleaved` pairs neighboring channels (the paper, RoFormer);
    `half` pairs channel i with i + r/2 (LLaMA and most current models). Scalings give other frequencies
    (`rotary_scaling.py`), and layers whose attention asks for it (`angles="local"`) a theta and scaling of their own.

    length: tokens that the model is for, which some scalings compare a text with.
    """

    def __init__(self, width: int, spec: RotarySpec, length: int = 512):
        super().__init__()
        self.width, self.spec, self.length = width, spec, length
        self.has_local = spec.has_local

    def rotation(
        self, positions: Tensor, like: Tensor, tokens: Tensor | None = None, local: bool = False
    ) -> RotaryTables:
        spec = self.spec
        theta = float(spec.theta if not local or spec.local_theta is None else spec.local_theta)
        scaling = build_scaling(spec.local_scaling if local else spec.scaling)
        interleaved = spec.layout == "interleaved"
        if scaling is None:
            frequencies, amplitude = known_frequencies(theta, self.width, positions, interleaved), 1.0
        else:
            tokens = positions.amax(-1) + 1 if tokens is None else tokens
            plain = scaling.frequencies(theta, self.width, self.length, tokens)
            frequencies, amplitude = both_ways(plain, interleaved), scaling.amplitude(self.length)
        # Angles in float32: in bfloat16 neighboring positions beyond 256 would collapse.
        angles = positions.to(torch.float32).unsqueeze(1).unsqueeze(-1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if amplitude != 1.0:
            cos, sin = cos * amplitude, sin * amplitude
        by_length = scaling is not None and scaling.by_length
        return RotaryTables(cos.to(like.dtype), sin.to(like.dtype), interleaved, spec.values, by_length)


@register("position", "rotary", aliases=("roformer", "rope"))
class RotarySpec(PositionSpec):
    """
    Args:
        theta: base of the frequencies.
        fraction: part of each head's width that is rotated.
        layout: which channels pair.
        values: rotate the values as well (the released RoFormer's `rotary_value`), with dense attention.
        scaling: how frequencies are stretched for long texts, a type and its fields: `linear`, `dynamic`, `yarn`,
            `longrope`, `llama3` or `proportional` (`rotary_scaling.py`), or None.
        local_theta: base of the frequencies for layers whose attention has `angles="local"` (Gemma 3, ModernBERT),
            None: `theta`.
        local_scaling: how theirs are stretched.
    """

    supports = frozenset({"context_parallel"})
    summary = "queries and keys rotated by their position"
    acts = frozenset({"rotation"})

    theta: float | int = 10000.0
    fraction: float | int = bounded(1.0, above=0, most=1)
    layout: Literal["interleaved", "half"] = "half"
    values: bool = False
    scaling: dict | str | RotaryScaling | None = None
    local_theta: float | int | None = None
    local_scaling: dict | str | RotaryScaling | None = None

    def check_fields(self) -> None:
        for name, theta in (("theta", self.theta), ("local_theta", self.local_theta)):
            if theta is not None and theta <= 1:
                raise ValueError(f"rotary needs `{name}` > 1, got {theta}.")
        self.scaling = build_scaling(self.scaling)
        self.local_scaling = build_scaling(self.local_scaling, "local_scaling")

    @property
    def has_local(self) -> bool:
        return self.local_theta is not None or self.local_scaling is not None

    def turns_by_length(self, angles: str) -> bool:
        given = {"global": self.scaling, "local": self.local_scaling}.get(angles)
        scaling = build_scaling(given)
        return scaling is not None and scaling.by_length

    def _width(self, config) -> int:
        return int(config.attention.rotated_width(config) * self.fraction)

    def check(self, config) -> None:
        width = self._width(config)
        if width % 2 or width == 0:
            raise ValueError(
                f"rotary turns pairs of channels, but {self.fraction} of head width"
                f" {config.attention.rotated_width(config)} is {width}; choose an even rotated width."
            )
        for scaling in (build_scaling(self.scaling), build_scaling(self.local_scaling)):
            if scaling is not None:
                scaling.check_width(width)
                if scaling.whole_heads and self.fraction != 1:
                    raise ValueError(
                        f"Rotary scaling {scaling.type!r} says itself which pairs of a head turn, got `fraction`"
                        f" {self.fraction}; leave that at 1."
                    )
                if scaling.by_length and self.values:
                    raise ValueError(
                        f"Rotary scaling {scaling.type!r} turns the tokens of a longer text otherwise, which rotary"
                        " with `values` cannot in a cache; leave `values` at False."
                    )
        if self.values and "values" not in config.attention.acts:
            raise ValueError(
                f"rotary with `values` rotates what dense attention sums, which attention {config.attention.type!r}"
                " does not; leave `values` at False."
            )

    def build(self, config, **where) -> RotaryPosition:
        return RotaryPosition(self._width(config), self, config.max_position_embeddings)
