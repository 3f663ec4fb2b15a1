# SPDX-License-Identifier: Apache-2.0
"""Tiles of a plan, and the sequences of queries and keys that they index; see [`plan`](plan.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .pattern_base import Pattern

CACHED_MASK_LIMIT = 1 << 17


@dataclass(frozen=True)
class Axis:
    """A sequence of tokens inside a longer one: token `i` has position `start + gap * i`, or `listed[i]`."""

    length: int
    start: int = 0
    gap: int = 1
    listed: Tensor | None = None

    def position(self, index: int) -> int:
        return self.start + self.gap * index if self.listed is None else int(self.listed[index])

    def at_or_after(self, position: int) -> int:
        """Index of the first token whose position is at least `position`."""
        if self.listed is not None:
            return int(torch.searchsorted(self.listed, position))
        return min(max(-((self.start - position) // self.gap), 0), self.length)


@dataclass
class Tiles:
    """`classes * blocks` tiles: tile (c, t) has the queries `q_start + c + gap * (step * t + 0..rows-1)` and the keys
    `k_start + c + gap * (step * t + 0..width-1)`, as indices into the sequences of their part.
    """

    rows: int
    width: int
    pattern: Pattern  # what these tiles hold
    q_start: int = 0
    k_start: int = 0
    classes: int = 1
    blocks: int = 1
    step: int = 1
    gap: int = 1
    q_index: Tensor | None = None  # [blocks, rows]: a gathered tile instead of a strided one
    k_index: Tensor | None = None  # [blocks, width]
    k_valid: Tensor | None = None  # [blocks, width], False for slots that are only filling
    uniform: bool = True  # one mask serves all tiles
    full: bool = False  # no mask needed
    cached: dict = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.classes * self.blocks

    def indices(self, which: str, each: bool = False) -> Tensor:
        """Token indices [tiles or 1, rows or width] of queries ("q") or keys ("k").

        Only those of the first tile when one mask serves all, unless `each` tile is asked for.
        """
        listed = self.q_index if which == "q" else self.k_index
        if listed is not None:
            return listed
        start, length = (self.q_start, self.rows) if which == "q" else (self.k_start, self.width)
        within = self.gap * torch.arange(length)
        if self.uniform and not each:
            return (start + within)[None]
        origin = torch.arange(self.classes)[:, None] + self.gap * self.step * torch.arange(self.blocks)
        return start + origin.reshape(-1, 1) + within


@dataclass
class Part:
    """Tiles that together hold the pairs of `pattern` that are not `taken` by earlier parts.

    They index the whole sequences, or the gathered `rows` of the queries or `columns` of the keys.
    """

    pattern: Pattern
    taken: Pattern | None
    q_axis: Axis
    k_axis: Axis
    rows: Tensor | None = None
    columns: Tensor | None = None
    tiles: list[Tiles] = field(default_factory=list)

    @property
    def exact(self) -> Pattern:
        return self.pattern if self.taken is None else self.pattern & ~self.taken

    def positions(self, tiles: Tiles, which: str, each: bool = False) -> Tensor:
        axis = self.q_axis if which == "q" else self.k_axis
        index = tiles.indices(which, each)
        return axis.start + index if axis.listed is None else axis.listed[index]

    def hidden(self, tiles: Tiles, dtype: torch.dtype, device: torch.device) -> list[tuple[int, int, Tensor]]:
        """Where the pattern hides pairs of these tiles: pieces (begin, end, bias) over ranges of key columns.

        The biases are 0 or -inf, [tiles or 1, rows or 1, end - begin]; columns outside of all pieces are fully
        allowed.
        """
        if (dtype, device) in tiles.cached:
            return tiles.cached[dtype, device]
        q, k = self.positions(tiles, "q")[:, :, None], self.positions(tiles, "k")[:, None, :]
        pieces = []
        for begin, end in self._doubtful(tiles, q, k):
            allowed = tiles.k_valid[:, None, begin:end] if tiles.k_valid is not None else None
            if not tiles.full:
                by_pattern = tiles.pattern.allows(q, k[:, :, begin:end])
                allowed = by_pattern if allowed is None else by_pattern & allowed
            if allowed is not None and not bool(allowed.all()):
                bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -math.inf).to(device)
                pieces.append((begin, end, bias))
        if sum(bias.numel() for _, _, bias in pieces) <= CACHED_MASK_LIMIT:
            tiles.cached[dtype, device] = pieces
        return pieces

    def _doubtful(self, tiles: Tiles, q: Tensor, k: Tensor) -> list[tuple[int, int]]:
        """Ranges of columns that are not allowed to every row by the arithmetic of the pattern alone."""
        if tiles.full:
            return [] if tiles.k_valid is None else [(0, tiles.width)]
        if not (tiles.uniform or tiles.count == 1) or tiles.k_index is not None:
            return [(0, tiles.width)]
        clear = tiles.pattern.covers(q.min(), q.max(), k.flatten(), k.flatten())
        columns = (~clear).nonzero().flatten().tolist()
        ranges: list[tuple[int, int]] = []
        for column in columns:
            if ranges and column - ranges[-1][1] < 16:  # short gaps are not worth a further step
                ranges[-1] = (ranges[-1][0], column + 1)
            else:
                ranges.append((column, column + 1))
        return ranges
