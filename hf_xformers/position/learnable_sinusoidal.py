# SPDX-License-Identifier: Apache-2.0
"""Sinusoids whose frequencies are learned, at the input or between pairs."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..core.precision import Float32Module
from ..core.reading_weights import weight_of
from .base import Position, PositionSpec, PositionTables, PositionTerms
from .score_terms import SelfAttentionTerms


class LearnableSinusoid(Float32Module, Position):
    """sin(omega_i t), cos(omega_i t) with trained omega [width / 2], which starts at base^(-2i/width) and stays in
    float32."""

    undecayed = ("frequency",)
    readers = ("angles",)

    def __init__(self, width: int, base: float):
        super().__init__()
        self.base = base
        self.frequency = nn.Parameter(torch.empty(width // 2))

    def initialize(self, config, init) -> None:
        exponent = torch.arange(0, 2 * self.frequency.shape[0], 2, dtype=torch.float32) / (2 * self.frequency.shape[0])
        init.copy_(self.frequency, torch.pow(torch.tensor(float(self.base)), -exponent))

    def angles(self, positions: Tensor) -> Tensor:
        """positions [...] -> [..., width / 2], in float32 at least: in bfloat16 positions beyond 256 would
        collapse."""
        wide = torch.float64 if self.frequency.dtype == torch.float64 else torch.float32
        return positions.to(wide).unsqueeze(-1) * weight_of(self, "frequency").to(wide)


class LearnableSinusoidalPosition(LearnableSinusoid):
    """x_t + PE(t)."""

    def __init__(self, config, spec: LearnableSinusoidalSpec):
        super().__init__(config.hidden_size, spec.base)
        self.layout = spec.layout

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        angles = self.angles(positions)
        parts = (angles.sin(), angles.cos())
        table = torch.cat(parts, dim=-1) if self.layout == "half" else torch.stack(parts, dim=-1).flatten(-2)
        return hidden_states + table.to(hidden_states.dtype)


@register("position", "learnable_sinusoidal")
class LearnableSinusoidalSpec(PositionSpec):
    """Wang et al. 2021 ("On Position Embeddings in BERT", ICLR): one vector of frequencies for the whole model. The
    gradient of a frequency grows with the position: it is left out of weight decay.

    base: the frequencies start as those of the fixed sinusoids with this base. layout: order of sines and cosines.
    """

    summary = "sinusoids with learned frequencies added to the input"
    acts = frozenset({"input"})

    base: float | int = bounded(10000.0, above=1)
    layout: Literal["interleaved", "half"] = "interleaved"

    def check(self, config) -> None:
        if config.hidden_size % 2:
            raise ValueError(f"learnable_sinusoidal needs an even `hidden_size`, got {config.hidden_size}.")

    def build(self, config, **where) -> LearnableSinusoidalPosition:
        return LearnableSinusoidalPosition(config, self)


class SharedSinusoid(LearnableSinusoid):
    """The frequencies that the terms of all layers read."""

    def shared_tables(self) -> SharedSinusoid:
        return self


class RelativeSinusoidTerms(PositionTerms):
    """score_ij += q_i R_{i-j}, R_n = [sin(omega n) | cos(omega n)].

    By the addition theorems that is a product of something of the query and its place with something of the key's
    place alone, so it costs one matrix product and picks nothing.
    """

    def score_terms(self, attention: Any, scale: float, context: Call) -> RelativeSinusoidScores:
        angles = context.prepared(PositionTables).module.angles
        made = (angles(context.query_index)[None], angles(context.key_index)[None])
        tables = tuple(table for angle in made for table in (angle.sin(), angle.cos()))
        return RelativeSinusoidScores(scale, tables, context)


class RelativeSinusoidScores(SelfAttentionTerms):
    """The terms of one call. Tables: sines and cosines [1, T or S, d / 2] of the angles of queries and keys."""

    separable = True

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sin, cos = tables[0].to(query.dtype), tables[1].to(query.dtype)
        first, second = query.chunk(2, dim=-1)
        # sin(a - b) = sin a cos b - cos a sin b, cos(a - b) = cos a cos b + sin a sin b
        return (torch.cat((second * sin - first * cos, first * sin + second * cos), dim=-1),)

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        table = torch.cat(tables[2:], dim=-1).to(key.dtype)
        return (table[None].expand(1, key.shape[1], -1, -1),)


@register("position", "learnable_sinusoidal_relative")
class RelativeSinusoidSpec(PositionSpec):
    """Wang et al. 2021 ("On Position Embeddings in BERT", ICLR), in place of a table of distances (Shaw et al. 2018):
    one vector of frequencies for all heads and layers.

    base: the frequencies start as those of the fixed sinusoids with this base.
    """

    summary = "scores gain the query times a sinusoid of the distance, with learned frequencies"
    acts = frozenset({"score_terms"})
    shares_tables = True

    base: float | int = bounded(10000.0, above=1)

    def check(self, config) -> None:
        if config.head_width % 2:
            raise ValueError(f"learnable_sinusoidal_relative needs an even head width, got {config.head_width}.")

    def shared_sizes(self, config) -> tuple:
        return (config.head_width,)

    def build(self, config, **where) -> SharedSinusoid:
        return SharedSinusoid(config.head_width, self.base)

    def build_terms(self, config, layer_idx: int) -> RelativeSinusoidTerms:
        return RelativeSinusoidTerms()
