# SPDX-License-Identifier: Apache-2.0
"""The algebra of position-based attention patterns: what a pattern is, and how patterns combine.

A pattern answers three questions about *absolute* positions and never looks at the content of a token:

- `allows(q, k)`: may query `q` read key `k`? Element-wise and broadcasting. This is the definition.
- `may(q_lo, q_hi, k_lo, k_hi)`: may a tile (a range of queries times a range of keys, both ends included) hold an
  allowed pair? Answering too often yes costs time, answering wrongly no is an error.
- `covers(q_lo, q_hi, k_lo, k_hi)`: is every pair of the tile allowed? Answering too often no costs time.

The last two are arithmetic on the ends of the ranges, so an engine finds the active tiles of any composition from
block numbers alone and never evaluates queries times keys. The patterns themselves are made by
[`hf_xformers.ops.block_sparse.patterns`].
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int | None, int | None]

_BY_KEY: weakref.WeakValueDictionary[int, Pattern] = weakref.WeakValueDictionary()
_BY_VALUE: weakref.WeakValueDictionary[int, Pattern] = weakref.WeakValueDictionary()
_NEXT_KEY = itertools.count()


def pattern_from_key(key: int) -> Pattern:
    """The living pattern whose `key` attribute is `key`. Raises KeyError when it has been garbage collected."""
    return _BY_KEY[key]


def same_pattern(pattern: Pattern) -> Pattern:
    """The first living pattern that equals `pattern`: layers with it have one graph when they are compiled one by
    one."""
    known = _BY_VALUE.setdefault(hash(pattern), pattern)
    return known if known == pattern else pattern


class Pattern:
    """Base of all patterns. Concrete ones are frozen dataclasses, equal when their fields are equal.

    Attributes:
        period: shifting query and key by this many positions together never changes `allows`. 1 when only the
            distance matters, 0 when there is no such number.
        gap: every allowed pair has `k = q (mod gap)`.
        layout: how an engine should walk the pattern: `"span"` (keys near one another), `"columns"` (a short list
            of keys for all queries), `"rows"` (a short list of queries), `"blocks"` (a table of key blocks).
        block: the pattern's own block size in the layout `"blocks"`; None when it has none.
        needs_length: what it allows depends on the number of key positions, until [`bind`] fixes it.
        solid: a single query may read every key of its [`span`].
    """

    period: int = 0
    gap: int = 1
    layout: str = "blocks"
    block: int | None = None
    needs_length: bool = False
    solid: bool = False
    key: int

    def __new__(cls, *args, **kwargs) -> Pattern:
        # A plain integer names the pattern inside compiled graphs, which cannot carry Python objects.
        self = super().__new__(cls)
        object.__setattr__(self, "key", next(_NEXT_KEY))
        _BY_KEY[self.key] = self
        return self

    def __getstate__(self) -> dict:
        # Copies and unpickled patterns get a key of their own.
        return {name: value for name, value in self.__dict__.items() if name != "key"}

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        """`allows` after `bind(length)`, where the numbers of key positions are a tensor that broadcasts with q and
        k."""
        return self.allows(q, k)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        raise NotImplementedError

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return torch.zeros_like(q_lo + k_lo, dtype=torch.bool)

    def span(self, q_lo: int, q_hi: int) -> Span:
        """First and last key that any query of `q_lo..q_hi` may read; None where there is no bound."""
        return None, None

    def columns(self, end: int) -> Tensor | None:
        """All keys below `end` that any query may read, ascending, when these are few; otherwise None."""
        return None

    def rows(self, end: int) -> Tensor | None:
        """All queries below `end` that read anything, ascending, when these are few; otherwise None."""
        return None

    def key_blocks(self, rows: Tensor, size: int) -> Tensor | None:
        """Blocks of `size` keys [n, slots] that the query blocks `rows` [n] may read, -1 for none, if they are
        listed."""
        return None

    def check_heads(self, num_heads: int) -> None:
        """Raise ValueError if the pattern is made for another number of heads."""
        for child in self.children():
            child.check_heads(num_heads)

    def children(self) -> tuple[Pattern, ...]:
        return ()

    def with_children(self, children: tuple[Pattern, ...]) -> Pattern:
        return self

    def mapped(self, change: Callable[[Pattern], Pattern]) -> Pattern:
        """The same expression with `change` applied to every atom."""
        if not self.children():
            return change(self)
        new = tuple(child.mapped(change) for child in self.children())
        return self if new == self.children() else self.with_children(new)

    def bind(self, length: int) -> Pattern:
        """Fix what depends on the number of key positions: negative positions and the legal set of random draws."""
        return self.mapped(lambda atom: atom._bind(length))

    def for_layer(self, layer: int) -> Pattern:
        """The pattern of one layer: random patterns draw anew in each."""
        return self.mapped(lambda atom: atom._for_layer(layer))

    def for_head(self, head: int) -> Pattern:
        """The pattern of one head."""
        if not self.children():
            return self._for_head(head)
        new = tuple(child.for_head(head) for child in self.children())
        return self if new == self.children() else self.with_children(new)

    def _bind(self, length: int) -> Pattern:
        return self

    def _for_layer(self, layer: int) -> Pattern:
        return self

    def _for_head(self, head: int) -> Pattern:
        return self

    def terms(self) -> list[tuple[Pattern, ...]]:
        """Disjunctive normal form: the pattern is the union of these intersections of atoms."""
        return [(self,)]

    def mask(self, q_len: int, k_len: int) -> Tensor:
        """Dense boolean mask [q_len, k_len], for pictures and small references only."""
        q, k = torch.arange(q_len), torch.arange(k_len)
        return self.bind(k_len).allows(q[:, None], k[None, :]).expand(q_len, k_len)

    def __or__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        return _combine(Union, self, other)

    def __and__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        return _combine(Intersection, self, other)

    def __invert__(self) -> Pattern:
        return self.inner if isinstance(self, Complement) else Complement(self)


def _combine(kind: type, left: Pattern, right: Pattern) -> Pattern:
    parts: list[Pattern] = []
    for side in (left, right):
        for part in side.children() if isinstance(side, kind) else (side,):
            if part not in parts:
                parts.append(part)
    everything = Everything()
    if kind is Union and everything in parts:
        return everything
    if kind is Intersection:
        parts = [part for part in parts if part != everything] or [everything]
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _common_period(parts: Sequence[Pattern]) -> int:
    return 0 if any(part.period == 0 for part in parts) else math.lcm(*(part.period for part in parts))


@dataclass(frozen=True)
class Everything(Pattern):
    """Every pair: dense attention."""

    period = 1
    layout = "span"
    solid = True

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones_like(q + k, dtype=torch.bool)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return torch.ones_like(q_lo + k_lo, dtype=torch.bool)

    covers = may


@dataclass(frozen=True)
class Union(Pattern):
    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", _common_period(self.parts))
        object.__setattr__(self, "gap", math.gcd(*(part.gap for part in self.parts)))
        object.__setattr__(self, "needs_length", any(part.needs_length for part in self.parts))

    def children(self) -> tuple[Pattern, ...]:
        return self.parts

    def with_children(self, children: tuple[Pattern, ...]) -> Pattern:
        return functools.reduce(lambda a, b: a | b, children)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a | b, (part.allows(q, k) for part in self.parts))

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a | b, (part.allows_within(q, k, length) for part in self.parts))

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a | b, (part.may(q_lo, q_hi, k_lo, k_hi) for part in self.parts))

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a | b, (part.covers(q_lo, q_hi, k_lo, k_hi) for part in self.parts))

    def span(self, q_lo: int, q_hi: int) -> Span:
        spans = [part.span(q_lo, q_hi) for part in self.parts]
        lows, highs = [low for low, _ in spans if low is not None], [high for _, high in spans if high is not None]
        return min(lows) if len(lows) == len(spans) else None, max(highs) if len(highs) == len(spans) else None

    def key_blocks(self, rows: Tensor, size: int) -> Tensor | None:
        found = [table for table in (part.key_blocks(rows, size) for part in self.parts) if table is not None]
        return torch.cat(found, 1) if len(found) == len(self.parts) else None

    def terms(self) -> list[tuple[Pattern, ...]]:
        return [term for part in self.parts for term in part.terms()]


@dataclass(frozen=True)
class Intersection(Pattern):
    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", _common_period(self.parts))
        object.__setattr__(self, "gap", math.lcm(*(part.gap for part in self.parts)))
        object.__setattr__(self, "needs_length", any(part.needs_length for part in self.parts))
        order = ("rows", "columns", "blocks", "span")
        object.__setattr__(self, "layout", min((part.layout for part in self.parts), key=order.index))
        object.__setattr__(self, "solid", all(part.solid for part in self.parts))

    def children(self) -> tuple[Pattern, ...]:
        return self.parts

    def with_children(self, children: tuple[Pattern, ...]) -> Pattern:
        return functools.reduce(lambda a, b: a & b, children)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a & b, (part.allows(q, k) for part in self.parts))

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a & b, (part.allows_within(q, k, length) for part in self.parts))

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a & b, (part.may(q_lo, q_hi, k_lo, k_hi) for part in self.parts))

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return functools.reduce(lambda a, b: a & b, (part.covers(q_lo, q_hi, k_lo, k_hi) for part in self.parts))

    def span(self, q_lo: int, q_hi: int) -> Span:
        spans = [part.span(q_lo, q_hi) for part in self.parts]
        lows = [low for low, _ in spans if low is not None]
        highs = [high for _, high in spans if high is not None]
        return max(lows) if lows else None, min(highs) if highs else None

    def columns(self, end: int) -> Tensor | None:
        found = [keys for keys in (part.columns(end) for part in self.parts) if keys is not None]
        return min(found, key=len) if found else None

    def rows(self, end: int) -> Tensor | None:
        found = [rows for rows in (part.rows(end) for part in self.parts) if rows is not None]
        return min(found, key=len) if found else None

    def key_blocks(self, rows: Tensor, size: int) -> Tensor | None:
        found = [table for table in (part.key_blocks(rows, size) for part in self.parts) if table is not None]
        return min(found, key=lambda table: table.shape[1]) if found else None

    def terms(self) -> list[tuple[Pattern, ...]]:
        # (A | B) & C -> A & C | B & C
        return [sum(choice, ()) for choice in itertools.product(*(part.terms() for part in self.parts))]


@dataclass(frozen=True)
class Complement(Pattern):
    """Every pair that `inner` does not allow. A filter on other patterns: alone it is as wide as dense attention."""

    inner: Pattern
    layout = "span"

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", self.inner.period)
        object.__setattr__(self, "needs_length", self.inner.needs_length)

    def children(self) -> tuple[Pattern, ...]:
        return (self.inner,)

    def with_children(self, children: tuple[Pattern, ...]) -> Pattern:
        return ~children[0]

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return ~self.inner.allows(q, k)

    def allows_within(self, q: Tensor, k: Tensor, length: Tensor) -> Tensor:
        return ~self.inner.allows_within(q, k, length)

    def may(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return ~self.inner.covers(q_lo, q_hi, k_lo, k_hi)

    def covers(self, q_lo: Tensor, q_hi: Tensor, k_lo: Tensor, k_hi: Tensor) -> Tensor:
        return ~self.inner.may(q_lo, q_hi, k_lo, k_hi)


@dataclass(frozen=True)
class PerHead(Pattern):
    """Head `h` uses `patterns[h]`; an engine resolves this with `for_head` before it asks anything else."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", _common_period(self.patterns))
        object.__setattr__(self, "needs_length", any(one.needs_length for one in self.patterns))

    def check_heads(self, num_heads: int) -> None:
        if len(self.patterns) != num_heads:
            raise ValueError(
                f"per_head has {len(self.patterns)} patterns for {num_heads} heads; give one for each head."
            )

    def children(self) -> tuple[Pattern, ...]:
        return self.patterns

    def with_children(self, children: tuple[Pattern, ...]) -> Pattern:
        return PerHead(children)

    def for_head(self, head: int) -> Pattern:
        return self.patterns[head].for_head(head)
