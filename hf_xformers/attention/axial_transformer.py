# SPDX-License-Identifier: Apache-2.0
"""Axial attention: a text as a grid, whose rows and columns attend one after the other."""

from __future__ import annotations

import math
from typing import Any

from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import Carry
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.token_grid import TokenGrid
from .shared.block_sparse import BlockSparseAttention
from .shared.pattern_spec import BlockSparseSpec


class AxialAttention(BlockSparseAttention):
    """Attention along the rows or the columns of a grid (see [`AxialTransformerSpec`]). In a decoder the outer rows
    are read whole; what they give is passed to later rows only, which the stack `axial_transformer` sees to."""

    def __init__(self, config, spec: AxialTransformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        if self.is_causal and layer_idx < outer_layers(config) and layer_idx % 2 == 0:
            self.is_causal = False


def outer_layers(config: Any) -> int:
    """How many of a decoder's first layers read the whole rows and the columns by turns, for later rows alone."""
    return config.stack.outer_layers(config) if HandOver.AXES in config.stack.gives else 0


@register("attention", "axial_transformer", aliases=("axial",))
class AxialTransformerSpec(BlockSparseSpec):
    """A sequence of R C tokens as a grid of R rows and C columns, row by row (Ho, Kalchbrenner, Weissenborn and
    Salimans 2019, arXiv 1912.12180, section 3):

        row attention: N(i) = {j : floor(j / C) = floor(i / C)},   column attention: N(i) = {j : j = i (mod C)}.

    In an encoder even layers have row attention and odd ones column attention, so that two reach everything. A decoder
    needs the stack `axial_transformer`, whose docstring says what its layers read. Time and memory O(T (R + C) D),
    which is O(T sqrt(T) D) for a square.

    columns: C (`None`: the root of max_position_embeddings; in a model of images the columns of patches). sum_axial:
    every layer has both, for half of the heads each: with twice the heads this is the sum of a row attention and a
    column attention with projections of their own (axial-attention's `sum_axial_out`); encoders only."""

    summary = "the rows and the columns of a grid of tokens attend by turns"
    reads = frozenset({HandOver.AXES})
    keeps_rotated = True  # finished rows stay what they were

    columns: int | None = bounded(None, least=2)
    sum_axial: bool = False

    def check(self, config) -> None:
        if config.modality == "image":
            self._check_image(config)
        if self.sum_axial and config.num_attention_heads % 2:
            raise ValueError(
                "axial_transformer with `sum_axial` gives half of the heads rows and half columns, but"
                f" `num_attention_heads` is {config.num_attention_heads}; make it even."
            )
        if config.is_decoder and self.sum_axial:
            raise ValueError(
                "axial_transformer in a decoder reads rows before columns, which `sum_axial` does not; leave it out."
            )
        if config.is_decoder and outer_layers(config) == 0:
            raise ValueError(
                "axial_transformer in a decoder needs a stack that lets every token read all earlier rows, which"
                f" {config.stack.type!r} does not: rows and columns that are both masked leave out what stands above"
                " to the right; use stack='axial_transformer'."
            )
        if not config.is_decoder and not self.sum_axial and config.num_hidden_layers == 1:
            raise ValueError(
                "axial_transformer has rows and columns in layers of their own, and there is one layer; take two, or"
                " sum_axial=True."
            )

    def _check_image(self, config) -> None:
        if config.embedding.leading_tokens:
            raise ValueError(
                f"axial_transformer reads an image as its grid of patches, in which {config.embedding.leading_tokens}"
                " tokens before them have no place; set `class_token=False` of the embedding."
            )
        if self.columns not in (None, config.grid[1]):
            raise ValueError(
                f"axial_transformer has `columns` {self.columns}, but the image has {config.grid[1]} columns of"
                " patches; leave `columns` out."
            )

    def columns_in(self, config) -> int:
        """C."""
        if self.columns is not None:
            return self.columns
        if config.modality == "image":
            return config.grid[1]
        return math.isqrt(max(config.max_position_embeddings, 1) - 1) + 1

    def token_grid(self, config) -> TokenGrid:
        columns = self.columns_in(config)
        return TokenGrid(max(-(-config.max_position_embeddings // columns), 1), columns)

    def carries(self, config) -> Carry | None:
        return Carry(None, (self.columns_in(config),)) if config.is_decoder else None

    def pattern(self, config, layer_idx: int) -> Pattern:
        columns = self.columns_in(config)
        row, column = patterns.block_local(columns), patterns.strided(columns)
        if self.sum_axial:
            half = config.num_attention_heads // 2
            return patterns.per_head(*(row,) * half, *(column,) * half)
        inner = config.is_decoder and layer_idx >= outer_layers(config)
        return column if layer_idx % 2 and not inner else row

    def build(self, config, **where) -> AxialAttention:
        return AxialAttention(config, self, **where)
