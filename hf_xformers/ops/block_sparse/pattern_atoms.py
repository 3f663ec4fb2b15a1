# SPDX-License-Identifier: Apache-2.0
"""The atoms of the pattern algebra. Users make them with the functions of
[`hf_xformers.ops.block_sparse.patterns`]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .pattern_base import Pattern, Span


@dataclass(frozen=True)
class Band(Pattern):
    """`-left <= k - q <= right`; None means no bound on that side."""

    left: int | None
    right: int | None
    period = 1
    layout = "span"
    solid = True

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        distance = k - q
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            allowed = allowed & (distance >= -self.left)
        if self.right is not None:
            allowed = allowed & (distance <= self.right)
        return allowed

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        possible = torch.ones_like(q_lo + k_lo, dtype=torch.bool)
        if self.left is not None:
            possible = possible & (k_hi >= q_lo - self.left)
        if self.right is not None:
            possible = possible & (k_lo <= q_hi + self.right)
        return possible

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        certain = torch.ones_like(q_lo + k_lo, dtype=torch.bool)
        if self.left is not None:
            certain = certain & (k_lo >= q_hi - self.left)
        if self.right is not None:
            certain = certain & (k_hi <= q_lo + self.right)
        return certain

    def span(self, q_lo: int, q_hi: int) -> Span:
        return None if self.left is None else q_lo - self.left, None if self.right is None else q_hi + self.right


@dataclass(frozen=True)
class ShareBand(Pattern):
    """`|k - q| <= ceil(share * length)`, a band once the length is known."""

    share: float
    layout = "span"
    needs_length = True

    def _bind(self, length: int) -> Pattern:
        radius = math.ceil(self.share * length)
        return Band(radius, radius)

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        return (k - q).abs() <= (self.share * length.to(torch.float64)).ceil()

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError("share_band is as wide as a part of the text; call bind(length) first.")

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return torch.ones_like(q_lo + k_lo, dtype=torch.bool)


@dataclass(frozen=True)
class Residue(Pattern):
    """`k = q (mod gap)`."""

    gap: int
    period = 1
    layout = "span"

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k - q) % self.gap == 0

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        largest, smallest = k_hi - q_lo, k_lo - q_hi
        return largest - largest % self.gap >= smallest

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return (q_lo == q_hi) & (k_lo == k_hi) & self.allows(q_lo, k_lo)


@dataclass(frozen=True)
class BlockLocal(Pattern):
    """Blocks of `size` tokens; a query reads its own block, `before` blocks before and `after` blocks after it."""

    size: int
    before: int
    after: int
    layout = "span"
    solid = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", self.size)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        distance = k // self.size - q // self.size
        return (distance >= -self.before) & (distance <= self.after)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        size = self.size
        return (k_hi // size >= q_lo // size - self.before) & (k_lo // size <= q_hi // size + self.after)

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        size = self.size
        return (k_lo // size >= q_hi // size - self.before) & (k_hi // size <= q_lo // size + self.after)

    def span(self, q_lo: int, q_hi: int) -> Span:
        return (q_lo // self.size - self.before) * self.size, (q_hi // self.size + self.after + 1) * self.size - 1


@dataclass(frozen=True)
class SummaryColumns(Pattern):
    """Keys `first <= k mod stride <= last`: the same few columns of every block, for every query."""

    stride: int
    first: int
    last: int
    layout = "columns"

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", self.stride)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        column = k % self.stride
        return (column >= self.first) & (column <= self.last) & (q == q)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        past_first = (k_lo - self.first) % self.stride  # how far k_lo lies behind the last start of a column group
        inside = past_first <= self.last - self.first
        return (inside | (k_lo + self.stride - past_first <= k_hi)) & (q_lo == q_lo)

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        past_first = (k_lo - self.first) % self.stride
        within = past_first + (k_hi - k_lo) <= self.last - self.first
        return (within | (self.last - self.first + 1 == self.stride)) & (q_lo == q_lo)

    def columns(self, end: int) -> Tensor | None:
        starts = torch.arange(self.first, max(end, self.first), self.stride)
        keys = (starts[:, None] + torch.arange(self.last - self.first + 1)).flatten()
        return keys[keys < end]


@dataclass(frozen=True)
class Positions(Pattern):
    """Keys (`axis="key"`) or queries (`axis="query"`) inside the half-open `intervals`.

    A negative bound counts from the end, like a Python slice, and None as upper bound is the end; `bind` resolves
    both.
    """

    axis: str
    intervals: tuple[tuple[int, int | None], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", "columns" if self.axis == "key" else "rows")
        ends = [bound for interval in self.intervals for bound in interval]
        object.__setattr__(self, "needs_length", any(bound is None or bound < 0 for bound in ends))

    def _bind(self, length: int) -> Pattern:
        resolved = sorted(slice(start, stop).indices(length)[:2] for start, stop in self.intervals)
        merged: list[tuple[int, int]] = []
        for start, stop in resolved:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            elif start < stop:
                merged.append((start, stop))
        return replace(self, intervals=tuple(merged))

    def _pick(self, q: Tensor, k: Tensor) -> Tensor:
        return k if self.axis == "key" else q

    def _any(self, test: Callable[[int, int], Tensor], like: Tensor) -> Tensor:
        found = torch.zeros_like(like, dtype=torch.bool)
        for start, stop in self.intervals:
            if stop is None or start < 0 or stop < 0:
                raise ValueError(f"global positions {self.intervals} count from the end; call bind(length) first.")
            found = found | test(start, stop)
        return found

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        x = self._pick(q, k)
        return self._any(lambda start, stop: (x >= start) & (x < stop), q + k)

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        x, found = self._pick(q, k), torch.zeros_like(q + k, dtype=torch.bool)
        for start, stop in self.intervals:
            low, high = (
                length if bound is None else bound if bound >= 0 else length + bound for bound in (start, stop)
            )
            found = found | ((x >= low) & (x < high))
        return found & (x >= 0) & (x < length)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        low, high = self._pick(q_lo, k_lo), self._pick(q_hi, k_hi)
        return self._any(lambda start, stop: (high >= start) & (low < stop), q_lo + k_lo)

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        low, high = self._pick(q_lo, k_lo), self._pick(q_hi, k_hi)
        return self._any(lambda start, stop: (low >= start) & (high < stop), q_lo + k_lo)

    def _listed(self, end: int) -> Tensor:
        ranges = [
            torch.arange(start, end if stop is None else min(stop, end))
            for start, stop in self.intervals
            if start < end
        ]
        return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.long)

    def columns(self, end: int) -> Tensor | None:
        return self._listed(end) if self.axis == "key" else None

    def rows(self, end: int) -> Tensor | None:
        return self._listed(end) if self.axis == "query" else None


class BlockSets(Pattern):
    """Each block of `block` queries reads a listed set of key blocks. Subclasses say which: `drawn`."""

    layout = "blocks"
    block: int

    def drawn(self, row: Tensor) -> list[Tensor]:
        """For query blocks `row` [...]: the key blocks read, one tensor [...] per slot; -1 where a slot is empty."""
        raise NotImplementedError

    def drawn_within(self, row: Tensor, length: Tensor) -> list[Tensor]:
        """`drawn` after `bind(length)`, where the numbers of key positions are a tensor that broadcasts with `row`."""
        return self.drawn(row)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._named(q, k, self.drawn(q // self.block))

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        return self._named(q, k, self.drawn_within(q // self.block, length))

    def _named(self, q: Tensor, k: Tensor, slots: list[Tensor]) -> Tensor:
        """Whether one of the slots names the key's block."""
        column = k // self.block
        allowed = torch.zeros_like(q + k, dtype=torch.bool)
        for slot in slots:
            allowed = allowed | (slot == column)
        return allowed

    def key_blocks(self, rows: Tensor, size: int) -> Tensor | None:
        return torch.stack([*self.drawn(rows), torch.full_like(rows, -1)], 1) if size == self.block else None

    def _hits(self, row: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        hits = torch.zeros_like(row + k_lo)
        for slot in self.drawn(row):
            hits = hits + ((slot >= k_lo // self.block) & (slot <= k_hi // self.block))
        return hits

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        first, last = q_lo // self.block, q_hi // self.block
        steps = int((last - first).max()) + 1
        if steps > 16:  # a tall tile: "perhaps" is cheaper than the answer
            return torch.ones_like(q_lo + k_lo, dtype=torch.bool)
        possible = torch.zeros_like(q_lo + k_lo, dtype=torch.bool)
        for step in range(steps):
            possible = possible | (self._hits(torch.minimum(first + step, last), k_lo, k_hi) > 0)
        return possible

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        first, last = q_lo // self.block, q_hi // self.block
        wanted = k_hi // self.block - k_lo // self.block + 1
        steps = int((last - first).max()) + 1
        certain = torch.full_like(q_lo + k_lo, steps <= 16, dtype=torch.bool)
        for step in range(min(steps, 16)):
            certain = certain & (self._hits(torch.minimum(first + step, last), k_lo, k_hi) == wanted)
        return certain


# The finaliser of SplitMix64 (Steele, Lea and Flood 2014): (shift, factor) twice, then a last shift by 31.
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, so that seed 0 is not a fixed point


def _mix_int(x: int) -> int:
    for shift, factor in _MIX:
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """The same on int64 tensors, whose arithmetic wraps around; their right shift keeps the sign, hence the masks."""
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - 2**64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True)
class RandomBlocks(BlockSets):
    """`count` distinct key blocks per query block, drawn uniformly from its legal set. See [`random_blocks`]."""

    count: int
    size: int
    seed: int
    causal: bool
    before: int
    after: int
    first: int
    last: int
    vary_heads: bool
    layer: int = 0
    head: int = 0
    total: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", self.size)
        object.__setattr__(self, "needs_length", self.total is None and not self.causal)

    def _bind(self, length: int) -> Pattern:
        return self if self.total is not None else replace(self, total=-(-length // self.size))

    def _for_layer(self, layer: int) -> Pattern:
        return replace(self, layer=layer)

    def _for_head(self, head: int) -> Pattern:
        return replace(self, head=head, vary_heads=False) if self.vary_heads else self

    def drawn_within(self, row: Tensor, length: Tensor) -> list[Tensor]:
        return self._drawn(row, -(-length // self.size) if self.needs_length else self.total)

    def drawn(self, row: Tensor) -> list[Tensor]:
        if self.needs_length:
            raise ValueError("random_blocks draws from all key blocks; call bind(length) first.")
        return self._drawn(row, self.total)

    def _drawn(self, row: Tensor, total: int | Tensor | None) -> list[Tensor]:
        """[`drawn`] among `total` key blocks."""
        # Floyd's algorithm: sampling without replacement in `count` steps, for all rows at once. The random numbers
        # are a hash of (seed, layer, head, row, step): no generator state, and the same row always draws the same.
        row = row.long()
        end = row + 1 if self.causal or total is None else torch.zeros_like(row) + (total - self.last)
        skip_from = torch.clamp(row - self.before, min=self.first)
        skip_from = torch.minimum(skip_from, torch.clamp(end, min=self.first))
        skip_to = torch.maximum(torch.minimum(row + self.after + 1, end), skip_from)
        legal = torch.clamp(end - self.first - (skip_to - skip_from), min=0)
        start = _mix_int(_mix_int(_mix_int((self.seed + _GOLDEN) % 2**64) + self.layer) + self.head) % 2**64
        stream = _mix(row + (start - 2**64 if start >= 2**63 else start))
        slots: list[Tensor] = []
        for step in range(self.count):
            bound = torch.clamp(legal - self.count, min=0) + step
            draw = (_mix(stream + (step + 1)) & ((1 << 62) - 1)) % (bound + 1)
            for slot in slots:
                draw = torch.where(slot == draw, bound, draw)
            slots.append(torch.where(legal > step, draw, torch.full_like(draw, -1)))
        shifted = []
        for slot in slots:
            column = slot + self.first
            column = torch.where(column >= skip_from, column + (skip_to - skip_from), column)
            shifted.append(torch.where(slot < 0, slot, column))
        return shifted


@dataclass(frozen=True)
class BlockRing(BlockSets):
    """Blocks of `size` tokens in a ring of `total`: a query reads its own block, `before` blocks before and `after`
    blocks after it, where the last block stands before the first."""

    size: int
    before: int
    after: int
    total: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", self.size)
        object.__setattr__(self, "needs_length", self.total is None)

    def _bind(self, length: int) -> Pattern:
        return self if self.total is not None else replace(self, total=max(-(-length // self.size), 1))

    def drawn_within(self, row: Tensor, length: Tensor) -> list[Tensor]:
        return self._around(row, torch.clamp(-(-length // self.size), min=1) if self.total is None else self.total)

    def drawn(self, row: Tensor) -> list[Tensor]:
        if self.total is None:
            raise ValueError("block_ring closes at the end of the text; call bind(length) first.")
        return self._around(row, self.total)

    def _around(self, row: Tensor, total: int | Tensor) -> list[Tensor]:
        """[`drawn`] in a ring of `total` blocks; one that is met twice is read once."""
        slots: list[Tensor] = []
        for offset in range(-self.before, self.after + 1):
            again = (torch.zeros_like(row) + total) <= offset + self.before
            slots.append(((row + offset) % total).masked_fill(again, -1))
        return slots
