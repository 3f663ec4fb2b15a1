"""The words in which terms of scores are said: who sees whom, and what a block or a tile of pairs is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..common.shifted_rows import SharedRows

# `visible(queries, keys)`: who sees whom, a boolean mask [B or 1, 1 or H, t or 1, s], for slices of both.
Visible = Callable[[slice, slice], Tensor]


class VisiblePairs(Protocol):
    """Who sees whom. ordered: keys that are later than a query are hidden from it, beside what [`VisiblePairs.hidden`]
    says."""

    ordered: bool

    def last_key(self, stop: int) -> int:
        """How many keys the queries before `stop` can see at most."""
        ...

    def hidden(self, rows: slice, keys: slice) -> Tensor | None:
        """Which pairs may not be seen, the order apart, [B or 1, 1 or H, t or 1, s] boolean; None: none of them."""
        ...


class QueryBlock(NamedTuple):
    """Some queries, and the first keys of all: the pairs whose terms are made together.

    query: `[B, h, t, d]`, those of `rows` alone. by_query: what belongs to them, `[B or 1, h, t, n]` each; by_key and
    by_distance: what belongs to all keys and to all distances, each taken from once. rows: which of the queries. keys:
    how many keys.
    """

    query: Tensor
    by_query: tuple[Tensor, ...]
    by_key: tuple[SharedRows, ...]
    rows: slice
    keys: int
    by_distance: tuple[SharedRows, ...] = ()


class Terms(VisiblePairs, Protocol):
    """What makes the terms. Whatever has a gradient comes in as an argument; nothing is kept between calls."""

    has_values: bool

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """query [B, h, T, d] -> what belongs to queries, [B or 1, h, T, n] each."""
        ...

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """key [B, h, S, d] -> what belongs to keys, [B or 1, h, S, n] each."""
        ...

    def by_distance(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What belongs to distances, [1, h, distances, n] each."""
        ...

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        """The terms of a block of pairs, [B or 1, h, t, s]. Nobody else may read the result, and its values are in no
        derivative."""
        ...

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice) -> Tensor:
        """weights [B, h, t, s] -> what is added to the output, [B, h, t, d] (only where `has_values`)."""
        ...

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        """scores [B or 1, h, t, s] of the queries `rows` -> the same with -inf where a pair is hidden, in place unless
        the batch is wider than `scores`."""
        ...


@dataclass(frozen=True)
class Blocks:
    """How the work is cut: `heads` heads at a time, `rows` queries at a time."""

    heads: int
    rows: int


class Pairs(NamedTuple):
    """n tiles of queries [B, h, n, t, d] and keys [B, h, n, s, d], what terms have found for them alone, laid out
    alike, and their places among all queries and keys, [B or 1, h or 1, n, t or s]."""

    query: Tensor
    key: Tensor
    by_query: tuple[Tensor, ...]
    by_key: tuple[Tensor, ...]
    query_at: Tensor
    key_at: Tensor

    @classmethod
    def of_block(cls, query: Tensor, key: Tensor, rows: slice, keys: int) -> Pairs:
        """One tile: the queries `rows` [B, h, t, d] and the first `keys` keys [B, h, keys, d]."""
        places = (torch.arange(rows.start, rows.stop, device=query.device), torch.arange(keys, device=query.device))
        return cls(query.unsqueeze(2), key.unsqueeze(2), (), (), *(at[None, None, None] for at in places))


class PairTerms(Protocol):
    """What makes the terms. Whatever has a gradient comes in as an argument; `h` stands for some of the heads."""

    has_values: bool

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """query [B, h, T, d] -> what belongs to queries, [B or 1, h, T, n] each."""
        ...

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """key [B, h, S, d] -> what belongs to keys, [B or 1, h, S, n] each."""
        ...

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """The terms, broadcastable to [B, h, n, t, s]."""
        ...

    def pair_values(self, weights: Tensor, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """weights [B, h, n, t, s] -> what is added to the output, [B, h, n, t, d] (only where `has_values`)."""
        ...


@dataclass(frozen=True)
class Tiles:
    """n tiles of t queries and s keys.

    query_at: `[B or 1, H or 1, n, t]` integers, places among the queries; below 0: none. key_at: `[B or 1, H or 1, n,
    s]`, places among the keys, any number where `allowed` says that there is none. allowed: `[B or 1, H or 1, n, t,
    s]` boolean, the pairs that count. own_score: the score of a query with itself, if it is a constant; offset: the
    place of the first query among the keys, which says who that is.
    """

    query_at: Tensor
    key_at: Tensor
    allowed: Tensor
    own_score: float | None = None
    offset: int = 0

    def of_heads(self, heads: slice) -> Tiles:
        """The tiles of some heads."""
        query_at, key_at, allowed = (
            x if x.shape[1] == 1 else x[:, heads] for x in (self.query_at, self.key_at, self.allowed)
        )
        return Tiles(query_at, key_at, allowed, self.own_score, self.offset)
