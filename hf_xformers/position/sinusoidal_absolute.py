# SPDX-License-Identifier: Apache-2.0
"""Sinusoidal absolute positions."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from ..core.call import can_inspect
from ..core.components import bounded, register
from .base import Position, PositionSpec


def _frequencies(width: int, base: float, device: torch.device) -> Tensor:
    exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    return torch.pow(base, -exponent)


@functools.lru_cache(maxsize=16)
def _kept_frequencies(width: int, base: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # for calls that record gradients as well
        return _frequencies(width, base, device)


def sinusoids(positions: Tensor, width: int, base: float, layout: str) -> Tensor:
    """Sinusoidal encoding (Vaswani et al. 2017, section 3.5), computed in float32 whatever the model's dtype.

    omega_i = base^(-2i/width); entry 2i is sin(omega_i t), entry 2i+1 cos(omega_i t) (`interleaved`), or all sines
    first (`half`). positions [...] integer -> [..., width] float32. There is no table, so no maximum length.
    """
    kept = can_inspect() and type(positions) is Tensor  # not where a graph is recorded, or shapes alone are worked out
    frequencies = (_kept_frequencies if kept else _frequencies)(width, base, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    parts = (angles.sin(), angles.cos())
    return torch.cat(parts, dim=-1) if layout == "half" else torch.stack(parts, dim=-1).flatten(-2)


class SinusoidalPosition(Position):
    """x_t + PE(t + offset), see [`sinusoids`]."""

    def __init__(self, spec: SinusoidalSpec):
        super().__init__()
        self.spec = spec

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        positions = positions + self.spec.offset if self.spec.offset else positions
        table = sinusoids(positions, hidden_states.shape[-1], self.spec.base, self.spec.layout)
        return hidden_states + table.to(hidden_states.dtype)


@register("position", "sinusoidal_absolute", aliases=("sinusoidal",))
class SinusoidalSpec(PositionSpec):
    """base: longest wavelength is base * 2 pi tokens. layout: order of sines and cosines along the width. offset: the
    position that the first token has (fairseq's models start after the padding token's id).

    Token vectors that start as small as BERT's drown in sinusoids, and a model learns little more than the frequencies
    of tokens for hundreds of steps; set `embedding={"type": "token", "scale": True}`, as Vaswani et al. do."""

    supports = frozenset({"context_parallel"})
    summary = "fixed sinusoids added to the input"
    acts = frozenset({"input"})
    any_width = True

    base: float | int = bounded(10000.0, above=1)
    layout: Literal["interleaved", "half"] = "interleaved"
    offset: int = bounded(0, least=0)

    def check(self, config) -> None:
        width = config.embedding.position_width(config)
        if width % 2:
            raise ValueError(f"sinusoidal_absolute needs an even width (`hidden_size`), got {width}.")

    def build(self, config, **where) -> SinusoidalPosition:
        return SinusoidalPosition(self)
