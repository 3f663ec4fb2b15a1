# SPDX-License-Identifier: Apache-2.0
"""Patterns of images as sequences: blocks of queries that read what is near them along the sequence or on the plane.

Image Transformer (Parmar et al. 2018, arXiv 1802.05751), sections 3.2 and 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .pattern_atoms import BlockSets
from .pattern_base import Pattern, Span
from .patterns import _at_least


@dataclass(frozen=True)
class BlockMemory(Pattern):
    """Blocks of `size` tokens; a query reads its own block, `before` tokens before it and `after` tokens behind it."""

    size: int
    before: int
    after: int
    layout = "span"

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", self.size)

    def _ends(self, q_lo: Tensor, q_hi: Tensor) -> tuple[Tensor, Tensor]:
        """First key of the block of `q_lo` and last one of the block of `q_hi`."""
        return q_lo // self.size * self.size - self.before, (q_hi // self.size + 1) * self.size - 1 + self.after

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        first, last = self._ends(q, q)
        return (k >= first) & (k <= last)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        first, last = self._ends(q_lo, q_hi)
        return (k_hi >= first) & (k_lo <= last)

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        first, last = self._ends(
            q_hi, q_lo
        )  # the narrowest: from the last block's first key to the first block's last
        return (k_lo >= first) & (k_hi <= last)

    def span(self, q_lo: int, q_hi: int) -> Span:
        return q_lo // self.size * self.size - self.before, (q_hi // self.size + 1) * self.size - 1 + self.after


@dataclass(frozen=True)
class BlockPlane(BlockSets):
    """A plane of `across` blocks in a row, of `size` tokens each, that a sequence goes through block by block; a query
    reads its own block and those up to `above`, `below` rows of blocks and `beside` columns of blocks away."""

    size: int
    across: int
    above: int
    below: int
    beside: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", self.size)

    def drawn(self, row: Tensor) -> list[Tensor]:
        slots: list[Tensor] = []
        column = row % self.across
        for up in range(-self.above, self.below + 1):
            for side in range(-self.beside, self.beside + 1):
                outside = (column + side < 0) | (column + side >= self.across) | (row // self.across + up < 0)
                slots.append((row + up * self.across + side).masked_fill(outside, -1))
        return slots


@dataclass(frozen=True)
class RasterPlane(Pattern):
    """The same on a plane of `line` tokens in a row that a sequence goes through row by row: a query of a block of
    `height` x `width` reads the block and `flange` rows and `sides` columns around it; `below`: also the rows
    under the block."""

    line: int
    height: int
    width: int
    flange: int
    sides: int
    below: bool
    layout = "span"

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", self.line * self.height)

    def _rows(self, q_lo: Tensor, q_hi: Tensor) -> tuple[Tensor, Tensor]:
        """First and last row that a query of this range may read."""
        tall = self.line * self.height
        first, last = q_lo // tall * self.height - self.flange, (q_hi // tall + 1) * self.height - 1
        return first, last + (self.flange if self.below else 0)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        first, last = self._rows(q, q)
        row, column = k // self.line, k % self.line
        left = q % self.line // self.width * self.width
        near = (column >= left - self.sides) & (column < left + self.width + self.sides)
        return (row >= first) & (row <= last) & near

    def _columns(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether queries and keys stand in one row each; and there, whether some query reads the column of some key,
        and whether each reads those of all."""
        lines = (q_lo // self.line == q_hi // self.line) & (k_lo // self.line == k_hi // self.line)
        first, last = (q % self.line // self.width * self.width for q in (q_lo, q_hi))
        left, right = k_lo % self.line, k_hi % self.line
        some = (right >= first - self.sides) & (left < last + self.width + self.sides)
        each = (left >= last - self.sides) & (right < first + self.width + self.sides)
        return lines, some, each

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        first, last = self._rows(q_lo, q_hi)
        lines, some, _ = self._columns(q_lo, q_hi, k_lo, k_hi)
        return (k_hi // self.line >= first) & (k_lo // self.line <= last) & (some | ~lines)

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        first, last = self._rows(q_hi, q_lo)  # the narrowest
        lines, _, each = self._columns(q_lo, q_hi, k_lo, k_hi)
        return (k_lo // self.line >= first) & (k_hi // self.line <= last) & each & lines

    def span(self, q_lo: int, q_hi: int) -> Span:
        first, last = self._rows(torch.tensor(q_lo), torch.tensor(q_hi))
        return int(first) * self.line, (int(last) + 1) * self.line - 1


def block_memory(block: int, before: int, after: int = 0) -> Pattern:
    """Local 1-D attention: own block of `block` tokens, `before` tokens before it and `after` behind it."""
    _at_least(1, block=block)
    _at_least(0, before=before, after=after)
    return BlockMemory(block, before, after)


def block_plane(
    columns: int, block: tuple[int, int], flange: tuple[int, int], *, order: str = "blocks", below: bool = True
) -> Pattern:
    """Local 2-D attention on a plane with `columns` tokens in a row: each block of queries reads itself and a flange
    (height, width) around it; without `below` nothing under it.

    order: `blocks`, the sequence goes through the plane block by block (then the flange is a multiple of the block);
    `raster`, row by row.

    Raises:
        ValueError: blocks that do not fill a row, or a flange that is no multiple of them, in the order of blocks.
    """
    (height, width), (rows, sides) = block, flange
    _at_least(1, columns=columns, height=height, width=width)
    _at_least(0, rows=rows, sides=sides)
    if columns % width:
        raise ValueError(f"blocks {width} wide do not fill rows of {columns} tokens; change one of them.")
    if order == "raster":
        return RasterPlane(columns, height, width, rows, sides, below)
    if rows % height or sides % width:
        raise ValueError(
            f"a flange of {flange} is no multiple of blocks of {block}, which are read whole; change one."
        )
    above, beside = rows // height, min(sides // width, columns // width - 1)
    return BlockPlane(height * width, columns // width, above, above if below else 0, beside)
