# SPDX-License-Identifier: Apache-2.0
"""A sequence as a grid of tokens: which row and column each of its places has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenGrid:
    """`rows` x `columns` places, which a sequence goes through row by row; with `block` (height, width) block by
    block, row by row inside each and from one to the next (Parmar et al. 2018, arXiv 1802.05751, section 3.3)."""

    rows: int
    columns: int
    block: tuple[int, int] | None = None

    def raster(self, place: Tensor) -> Tensor:
        """Places in the sequence -> the same cells counted row by row."""
        if self.block is None:
            return place
        height, width = self.block
        block, inside = place // (height * width), place % (height * width)
        across = self.columns // width
        row = block // across * height + inside // width
        return row * self.columns + block % across * width + inside % width

    def sequence(self, raster: Tensor) -> Tensor:
        """Cells counted row by row -> their places in the sequence."""
        if self.block is None:
            return raster
        height, width = self.block
        row, column = raster // self.columns, raster % self.columns
        block = row // height * (self.columns // width) + column // width
        return block * height * width + row % height * width + column % width

    def ordered(self, cells: Tensor) -> Tensor:
        """Cells row by row, [B, rows * columns, ...] -> in the order of the sequence."""
        return cells[:, self.raster(torch.arange(cells.shape[1], device=cells.device))]

    def by_rows(self, tokens: Tensor) -> Tensor:
        """Tokens of a whole grid in the order of the sequence, [B, rows * columns, ...] -> row by row."""
        return tokens[:, self.sequence(torch.arange(tokens.shape[1], device=tokens.device))]
