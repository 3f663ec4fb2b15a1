# SPDX-License-Identifier: Apache-2.0
"""What engines read of terms that are added to attention scores, and the words in which terms are said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.products import widened
from ..common.shifted_rows import SharedRows

# `visible(queries, keys)`: who sees whom, a boolean mask [B or 1, 1 or H, t or 1, s], for slices of both.
Visible = Callable[[slice, slice], Tensor]


@dataclass(frozen=True)
class Blocks:
    """How the work is cut: `heads` heads at a time, `rows` queries at a time."""

    heads: int
    rows: int


class QueryBlock(NamedTuple):
    """Some queries, and the first keys of all: the pairs whose terms are made together.

    Args:
        query: `[B, h, t, d]`, those of `rows` alone.
        by_query: what belongs to them, `[B or 1, h, t, n]` each.
        by_key, by_distance: what belongs to all keys and to all distances, each taken from once.
        rows: which of the queries.
        keys: how many keys.
    """

    query: Tensor
    by_query: tuple[Tensor, ...]
    by_key: tuple[SharedRows, ...]
    rows: slice
    keys: int
    by_distance: tuple[SharedRows, ...] = ()


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


@dataclass(frozen=True)
class Tiles:
    """n tiles of t queries and s keys.

    Args:
        query_at: `[B or 1, H or 1, n, t]` integers, places among the queries; below 0: none.
        key_at: `[B or 1, H or 1, n, s]`, places among the keys, any number where `allowed` says that there is none.
        allowed: `[B or 1, H or 1, n, t, s]` boolean, the pairs that count.
        own_score: the score of a query with itself, if it is a constant.
        offset: the place of the first query among the keys, which says who that is.
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


class ScoreTerms:
    """What is added to scores and values in one call of a layer, and who sees whom.

        score_ij = scale * q_i k_j + term_ij,    o_i = sum_j softmax_j(score_ij) v_j [+ values_i]

    Attributes:
        has_values: whether the output gains something ([`ScoreTerms.values`], [`ScoreTerms.pair_values`]).
        separable: terms are products of [`ScoreTerms.by_query`] and [`ScoreTerms.by_key`], one tensor each or none,
            and a number for each distance ([`ScoreTerms.line`]); [`ScoreTerms.scores`] and [`ScoreTerms.pairs`] then
            follow from these.
        needs_weights: [`ScoreTerms.weighed`] wants to see the weights of all blocks.
        ordered: keys that are later than a query are hidden from it, next to what [`ScoreTerms.hidden`] says.

    Args:
        scale: the factor on the products of queries and keys. Engines take queries that are scaled already.
        tables: all that has a gradient next to queries and keys and has no axis of pairs, [H or 1, ...] each.

    Terms are made for some heads and some queries at a time, and again in the backward pass. So the methods are pure
    functions: whatever has a gradient comes in as an argument, the tables too, and `h` stands for the heads that are
    asked for. Terms of contiguous blocks ([`QueryBlock`]) are what engines over all pairs need, terms of any pairs
    ([`Pairs`]) what sparse ones need; a subclass that serves both has both.
    """

    has_values: bool = False
    separable: bool = False
    needs_weights: bool = False

    def __init__(self, scale: float, tables: tuple[Tensor, ...], num_queries: int, num_keys: int) -> None:
        self.scale, self.tables = scale, tables
        self.num_queries, self.num_keys = num_queries, num_keys

    # ------------------------------------------------------------------------------------------- terms

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """query [B, h, T, d] (scaled) -> what belongs to queries, [B or 1, h, T, n] each."""
        return ()

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """key [B, h, S, d] -> what belongs to keys and all blocks of queries read, [B or 1, h, S, n] each."""
        return ()

    def by_distance(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What belongs to distances and all blocks of queries read, [1, h, distances, n] each (not where
        `separable`)."""
        return ()

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        """A number for each distance (key - query) from the last query and the first key on, [h, T + S - 1], if scores
        get one (only where `separable`)."""
        return None

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        """The terms of a block of pairs, [B or 1, h, t, s]. Nobody else reads the result, which the caller may
        overwrite, and its values are in no derivative."""
        raise NotImplementedError

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """The terms of any pairs, broadcastable to [B, h, n, t, s]."""
        raise NotImplementedError

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice) -> Tensor:
        """weights [B, h, t, s] of the queries `rows` and the first s keys -> what is added to the output, [B, h, t, d]
        (only where `has_values`)."""
        raise NotImplementedError

    def pair_values(self, weights: Tensor, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """weights [B, h, n, t, s] of any pairs -> what is added to the output, [B, h, n, t, d] (only where
        `has_values`)."""
        raise NotImplementedError

    def weighed(self, weights: Tensor, rows: slice) -> None:
        """Told of the weights [B, h, t, s] of the queries `rows`, before dropout."""

    # ------------------------------------------------------------------------------------------- who sees whom

    @property
    def ordered(self) -> bool:
        return False

    @property
    def first_query(self) -> int:
        """The place of the first query among the keys: queries are the last of all."""
        return self.num_keys - self.num_queries

    @property
    def rows_can_be_empty(self) -> bool:
        """Whether some query may see nothing at all."""
        return False

    def last_key(self, stop: int) -> int:
        """How many keys the queries before `stop` can see at most."""
        return self.first_query + stop if self.ordered else self.num_keys

    def hidden(self, rows: slice, keys: slice) -> Tensor | None:
        """Which pairs may not be seen, the order apart, [B or 1, 1 or H, t or 1, s] boolean; None: none of them."""
        return None

    def visible(self, rows: slice, keys: int) -> Tensor | None:
        """Which of the first `keys` keys the queries `rows` see, the order included, [B or 1, 1 or H, t or 1, s];
        None: all of them."""
        raise NotImplementedError

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        """scores [B or 1, h, t, s] of the queries `rows` -> the same with -inf where a pair is hidden, in place unless
        the batch is wider than `scores`."""
        keys = scores.shape[-1]
        with torch.no_grad():
            first = self.first_query + rows.start + 1  # earlier keys are seen by all of these queries
            if self.ordered and first < keys:
                slots = torch.arange(first - 1, keys, device=scores.device)
                later = slots[1:] > slots[: scores.shape[-2], None]
                scores[..., first:].masked_fill_(later, -torch.inf)
            hidden = self.hidden(rows, slice(0, keys))
            if hidden is None:
                return scores
            if hidden.shape[0] > scores.shape[0]:
                return scores.masked_fill(hidden, -torch.inf)
            return scores.masked_fill_(hidden, -torch.inf)

    # ------------------------------------------------------------------------------------------- for callers

    def with_tables(self, tables: tuple[Tensor, ...]) -> Self:
        """The same terms with other tables; with none, for what lives longer than the call."""
        other = copy.copy(self)
        other.tables = tables
        return other

    def of_heads(self, heads: slice) -> Self:
        """Those of some heads."""
        return self.with_tables(tuple(x if x.shape[0] == 1 else x[heads] for x in self.tables))

    def matrix(self, query: Tensor, key: Tensor) -> Tensor:
        """query [B, h, T, d] (not scaled), key [B, h, S, d] -> the terms of all pairs, [B or 1, h, T, S], in float32
        at least"""
        with torch.autocast(query.device.type, enabled=False):
            (query, key), tables = widened(query * self.scale, key), widened(*self.tables)
            return self.scores(self.whole(query, key, tables), tables)

    def whole(self, query: Tensor, key: Tensor, tables: tuple[Tensor, ...]) -> QueryBlock:
        """All pairs of queries [B, h, T, d] (scaled) and keys [B, h, S, d] as one block."""
        of_keys = tuple(SharedRows(x, 1) for x in self.by_key(key, tables))
        of_distances = tuple(SharedRows(x, 1) for x in self.by_distance(tables))
        rows = slice(0, query.shape[2])
        return QueryBlock(query, self.by_query(query, tables), of_keys, rows, key.shape[2], of_distances)

    def from_matrix(
        self,
        reference: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        """The literal equation: `reference(scale=..., bias=...)` gives weights [B, H, T, S] -> output [B, H, T, d] and
        these weights."""
        weights = reference(scale=self.scale, bias=self.matrix(query, key))[1]
        dropped = F.dropout(weights, dropout) if dropout else weights
        return torch.matmul(dropped, value) + self.values_of_all(dropped), weights

    def values_of_all(self, weights: Tensor) -> Tensor | float:
        """weights [B, h, T, S] -> what is added to the output, [B, h, T, d] or 0"""
        if not self.has_values:
            return 0.0
        return self.values(weights, self.tables, slice(0, weights.shape[2]))
