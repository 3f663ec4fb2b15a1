# SPDX-License-Identifier: Apache-2.0
"""Axial positions: a long text as a grid, with one table for each of its axes."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.reading_weights import weight_of
from ..ops.common.token_grid import TokenGrid
from .base import Position, PositionSpec


class AxialPosition(Position):
    """x_t + [A^1[i_1] ; ... ; A^k[i_k]] or x_t + A^1[i_1] + ... + A^k[i_k], where (i_1, ..., i_k) are the coordinates
    of t in a grid of n_1 x ... x n_k places, the last axis running fastest; A^a [n_a, d_a].

    Kitaev, Kaiser, Levskaya 2020 (arXiv 2001.04451, released code). With two axes: i_1 = t // n_2 and i_2 = t mod n_2.
    Parameters: sum of n_a d_a, where one table of all places has n_1 ... n_k D.
    """

    def __init__(self, config, spec: AxialSpec):
        super().__init__()
        self.std = spec.std
        self.adds = spec.combine == "sum"
        self.order = spec.order(config)
        widths = spec.axis_widths(config)
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(count, width)) for count, width in zip(spec.grid(config), widths, strict=True)
        )

    def initialize(self, config, init) -> None:
        for table in self.tables:
            init.normal_(table, mean=0.0, std=self.std)

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        positions = positions if self.order is None else self.order.raster(positions)
        parts: list[Tensor] = []
        for index in reversed(range(len(self.tables))):
            table = weight_of(self.tables, str(index))
            parts.insert(0, table[positions % table.shape[0]])
            positions = positions // table.shape[0]
        return hidden_states + (sum(parts) if self.adds else torch.cat(parts, dim=-1))


@register("position", "axial")
class AxialSpec(PositionSpec):
    """
    Args:
        shape: places on each axis of the grid, which may be fewer than `max_position_embeddings` (a text is then no
            longer than the grid); by default the rows and columns that the attention reads a text as
            (axial_transformer, sparse_transformer, image_transformer), else two axes of about its root.
        widths: of each axis' vectors, with the sum D, by default D shared among them (only where vectors are
            concatenated).
        combine: `concatenation` of the axes' vectors, or their `sum`.
        std: of the normal distribution that tables start with.
    """

    supports = frozenset({"context_parallel"})
    summary = "learned vectors for each axis of a grid of positions, added to the input"
    acts = frozenset({"input"})
    any_width = True

    shape: tuple[int, ...] | None = bounded(None, least=1)
    widths: tuple[int, ...] | None = bounded(None, least=1)
    combine: Literal["concatenation", "sum"] = "concatenation"
    std: float | int = bounded(1.0, least=0)

    def check_fields(self) -> None:
        if self.widths is not None and self.combine == "sum":
            raise ValueError(
                f"axial with combine='sum' has vectors of one width, so leave out `widths` {self.widths}."
            )

    def check(self, config) -> None:
        if config.max_position_embeddings < 1:
            raise ValueError(f"axial needs `max_position_embeddings` >= 1, got {config.max_position_embeddings}.")
        width, shape, widths = config.embedding.position_width(config), self.grid(config), self.axis_widths(config)
        if len(widths) != len(shape):
            raise ValueError(f"axial has {len(widths)} `widths` {widths} for the {len(shape)} axes of {shape}.")
        if self.combine == "concatenation" and (sum(widths) != width or min(widths) < 1):
            raise ValueError(f"axial concatenates vectors to a width of {width}, but `widths` {widths} are not that.")

    def grid(self, config) -> tuple[int, ...]:
        """Places on each axis."""
        if self.shape is not None:
            return tuple(self.shape)
        own = config.attention.token_grid(config)
        if own is not None:
            return own.rows, own.columns
        first = max(math.isqrt(config.max_position_embeddings), 1)
        return first, -(-config.max_position_embeddings // first)

    def order(self, config) -> TokenGrid | None:
        """The grid whose cells a text does not go through row by row, where the attention knows one of this size."""
        own = config.attention.token_grid(config)
        if own is None or own.block is None or own.rows * own.columns != math.prod(self.grid(config)):
            return None
        return own

    def axis_widths(self, config) -> tuple[int, ...]:
        """Widths of each axis' vectors."""
        if self.widths is not None:
            return tuple(self.widths)
        width, axes = config.embedding.position_width(config), len(self.grid(config))
        if self.combine == "sum":
            return (width,) * axes
        return (*(width // axes,) * (axes - 1), width - width // axes * (axes - 1))

    def max_length(self, config) -> int:
        return min(math.prod(self.grid(config)), config.max_position_embeddings)

    def build(self, config, **where) -> AxialPosition:
        return AxialPosition(config, self)
