# SPDX-License-Identifier: Apache-2.0
"""Where the queries of attention with relative positions stand among its keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.prepared import Prepared


class QueryGrid(Prepared):
    """Where a stack moves or pools queries: their grid; of the states that keys and values are made of, how many there
    are (None: as many as slots before the tokens and tokens) and which are real [B, S] (None: all); and the types of
    queries and of keys, [B, T] and [B, S]."""

    grid: Grid
    count: int | None = None
    real: Tensor | None = None
    types: tuple[Tensor | None, Tensor | None] = (None, None)


class PairsInSight(Prepared):
    """Which pairs of queries and keys a stack lets see each other, [B, T, S] boolean."""

    pairs: Tensor


class KeyUsage(Prepared):
    """How much attention each key got, where a stack wants to know: step -> [B, M + T], the sums over heads and
    queries, in the order of the keys."""

    by_step: dict[int, Tensor]


@dataclass(frozen=True)
class Grid:
    """Where queries and keys stand: the distance of query i and key j is stride * (step * i - j + offset) tokens.

    apart: the first query and the first key ([CLS]) have no position; their position scores are 0.
    """

    offset: int
    step: int = 1
    stride: int = 1
    apart: bool = False

    def largest(self, queries: int) -> int:
        """The distance of the last of so many queries to the first key, in strides."""
        return self.step * (queries - 1) + self.offset

    def distances(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """[t, s], or [B, 1, t, s] where texts differ, for the queries `rows` and `keys`, in strides."""
        queries = torch.arange(rows.start, rows.stop, device=device) * self.step + self.offset
        return queries[:, None] - torch.arange(keys.start, keys.stop, device=device)[None]

    def without_first(self, scores: Tensor, rows: slice) -> Tensor:
        """Position scores [..., t, s] of the queries `rows`."""
        if not self.apart:
            return scores
        later = torch.arange(rows.start, rows.stop, device=scores.device)[:, None] > 0
        return scores * (later & (torch.arange(scores.shape[-1], device=scores.device) > 0)[None])


@dataclass(frozen=True)
class ScatteredGrid(Grid):
    """Query m of a text stands at the key `places[:, m]` [B, M], of `keys` keys."""

    offset: int = 0
    places: Tensor | None = None
    keys: int = 0

    def largest(self, queries: int) -> int:
        return self.keys - 1

    def distances(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        if self.places is None:
            raise ValueError("ScatteredGrid needs `places` [B, M], got None.")
        return self.places[:, None, rows, None] - torch.arange(keys.start, keys.stop, device=device)
