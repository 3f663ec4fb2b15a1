# SPDX-License-Identifier: Apache-2.0
"""The tokens of one round of sorted attention, in chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.tile_engines import Scratch

HIDDEN = 2.0**30  # subtracted from the score of a pair that does not count; a power of two keeps codes exact
LOG2_E = math.log2(math.e)
_SELF = -1e5 * LOG2_E  # of a query's own key where it is the last resort (Kitaev et al. 2020, appendix A)


@dataclass(frozen=True)
class Layout:
    """Chunks and windows: chunk length, chunks before and after its own, and what counts in them.

    Args:
        low, high: bounds on ``code_i - code_j``.
        causal: hide later positions.
        circular: the first chunk of a round looks back into the last one of the round before.
        last_resort: a query's own key counts only where nothing else does.
        distinct: a pair that an earlier round holds does not count again.
    """

    size: int
    before: int
    after: int
    low: int
    high: int
    causal: bool
    circular: bool
    last_resort: bool
    distinct: bool

    def to_list(self) -> list[int]:
        return [int(value) for value in vars(self).values()]

    @classmethod
    def from_list(cls, values: list[int]) -> Layout:
        size, before, after, low, high, *flags = values
        return cls(size, before, after, low, high, *(bool(flag) for flag in flags))

    @property
    def window(self) -> int:
        """Keys that a chunk of queries meets."""
        return (self.before + 1 + self.after) * self.size

    @property
    def far(self) -> tuple[int, int]:
        """Codes of slots without a token, as query and as key; they are out of reach of everything."""
        span = self.high - self.low + 2
        return -2 * span, -4 * span


class Round:
    """One round of a group of rows: which token stands where, and the penalties that follow.

    first, step: where the tokens of each row stand in memory, that is the first of them [rows] and from one to the
    next; what is gathered with `take` is there.
    """

    def __init__(
        self,
        order: Tensor,
        code: Tensor,
        number: int,
        layout: Layout,
        sums: torch.dtype,
        scratch: Scratch,
        first: Tensor | None = None,
        step: int = 1,
    ):
        rows, rounds, length = order.shape
        self.layout, self.rows, self.number, self.sums, self.scratch = layout, rows, number, sums, scratch
        self.chunks = -(-length // layout.size)
        slots, device = self.chunks * layout.size, order.device
        lead, tail = layout.before * layout.size, layout.after * layout.size
        index = F.pad(order, (0, slots - length)).long()
        empty = torch.arange(slots, device=device) >= length
        if layout.circular:
            ring = torch.arange(number * slots - lead, (number + 1) * slots + tail, device=device) % (rounds * slots)
            self.index, self.empty = index.flatten(1)[:, ring], empty[ring % slots]
        else:
            self.empty = F.pad(empty, (lead, tail), value=True)
            self.index = F.pad(index[:, number], (lead, tail))
        self.main = slice(lead, lead + slots)
        # Flat positions in [rows * length, width] and back: slot of each token, in [rows * slots, width].
        offset = torch.arange(rows, device=device)[:, None]
        self.flat = (self.index + offset * length).view(-1)
        self._at = None if first is None else self.index * step + first[:, None]
        self._offset, self._slots = offset * slots, slots
        center = (layout.low + layout.high) / 2
        self._half = (layout.high - layout.low) / 2 * HIDDEN
        self._codes = []
        for other in range(number + 1) if layout.distinct else (number,):
            own = code[:, other].gather(1, self.index)
            as_query = own[:, self.main].masked_fill(self.empty[self.main], layout.far[0]).sub_(center).mul_(HIDDEN)
            as_key = own.masked_fill_(self.empty, layout.far[1]).mul_(HIDDEN)
            self._codes.append((as_query, as_key))
        self._position = self.index.to(code.dtype) if layout.causal or layout.circular else None
        if layout.last_resort:
            again = layout.distinct and number > 0
            own = torch.full((slots,), -HIDDEN if again else _SELF, dtype=sums, device=device)
            self._own = own.masked_fill_(empty, -HIDDEN).view(self.chunks, -1)

    def sort(self, name: str, x: Tensor, *, main: bool = False) -> Tensor:
        """[rows, length, width] -> [rows, slots of the windows (or of the chunks alone), width]."""
        flat = self.flat.view(self.rows, -1)[:, self.main].reshape(-1) if main else self.flat
        out = self.scratch.get(name, x.dtype, flat.shape[0], x.shape[-1])
        torch.index_select(x.reshape(-1, x.shape[-1]), 0, flat, out=out)
        return out.view(self.rows, -1, x.shape[-1])

    def take(self, name: str, tokens: Tensor, *, main: bool = False) -> Tensor:
        """The same from the tokens of all rows, [B T H, width]."""
        if self._at is None:
            raise ValueError("A round that was made without `first` knows no tokens of all rows to take.")
        at = self._at[:, self.main] if main else self._at
        out = self.scratch.get(name, tokens.dtype, at.numel(), tokens.shape[-1])
        torch.index_select(tokens, 0, at.reshape(-1), out=out)
        return out.view(self.rows, -1, tokens.shape[-1])

    def unsort(self, x: Tensor, rank: Tensor) -> Tensor:
        """[rows, slots, width], rank [rows, length] -> [rows, length, width]."""
        flat = (rank + self._offset).view(-1)
        out = self.scratch.get("unsorted", x.dtype, flat.shape[0], x.shape[-1])
        torch.index_select(x.reshape(-1, x.shape[-1]), 0, flat, out=out)
        return out.view(*rank.shape, x.shape[-1])

    def add_windows(self, target: Tensor, grads: Tensor, rank: Tensor) -> None:
        """Adds what the window slots [rows, E, width] hold to the tokens [rows, length, width] that stand there."""
        target += self.unsort(grads[:, self.main], rank)
        if self.layout.circular:
            for part in (slice(0, self.main.start), slice(self.main.stop, None)):
                index = self.index[:, part, None].expand(-1, -1, target.shape[-1])
                target.scatter_add_(1, index, grads[:, part].masked_fill(self.empty[part, None], 0.0))

    def windows(self, x: Tensor, chunks: slice) -> Tensor:
        """[rows, E(, width)] -> the windows of some chunks, [rows, chunks, W(, width)], without a copy."""
        view = x.unfold(1, self.layout.window, self.layout.size)[:, chunks]
        return view if x.ndim == 2 else view.transpose(2, 3)

    def restrict(self, scores: Tensor, chunks: slice) -> None:
        """Makes the scores [rows, chunks, size, W] of pairs that do not count very small."""
        for number, (as_query, as_key) in enumerate(reversed(self._codes)):
            query = as_query.view(self.rows, self.chunks, -1, 1)[:, chunks]
            distance = self.scratch.get("distance", as_key.dtype, *scores.shape)
            torch.sub(query, self.windows(as_key, chunks)[:, :, None], out=distance).abs_()
            if number == 0:
                scores.sub_(distance.sub_(self._half).clamp_(min=0.0))
            else:  # an earlier round holds this pair
                scores.add_(distance.sub_(self._half + HIDDEN).clamp_(-HIDDEN, 0.0))
        if self.layout.causal:
            query, key = self._pairs(chunks)
            scores.sub_((key - query).clamp_(min=0.0).mul_(HIDDEN))
        if self.layout.last_resort:
            self._diagonal(scores).copy_(self._own[chunks])
            if self.layout.circular:
                scores.masked_fill_(self._same(chunks), _SELF)

    def drop_own(self, grads: Tensor, chunks: slice) -> None:
        """The own key's score is a constant: no gradient."""
        if self.layout.last_resort:
            self._diagonal(grads).zero_()
            if self.layout.circular:
                grads.masked_fill_(self._same(chunks), 0.0)

    def _pairs(self, chunks: slice) -> tuple[Tensor, Tensor]:
        if self._position is None:
            raise ValueError("Positions are kept for a causal or a circular order alone.")
        query = self._position[:, self.main].reshape(self.rows, self.chunks, -1, 1)[:, chunks]
        return query, self.windows(self._position, chunks)[:, :, None]

    def _same(self, chunks: slice) -> Tensor:
        query, key = self._pairs(chunks)
        used = ~self.empty[None].expand(self.rows, -1)
        asks = used[:, self.main].reshape(self.rows, self.chunks, -1, 1)[:, chunks]
        return (query == key) & asks & self.windows(used, chunks)[:, :, None]

    def _diagonal(self, scores: Tensor) -> Tensor:
        return scores.diagonal(self.layout.before * self.layout.size, dim1=-2, dim2=-1)
