# SPDX-License-Identifier: Apache-2.0
"""Position-based attention patterns: which keys a query may read.

A pattern is a pure function of the absolute positions of query and key; it never looks at the content of a token.
Patterns combine with `|` (union: a key never counts twice), `&` (intersection) and `~` (complement), and per head with
[`per_head`]::

    longformer = band(256, 256) | global_(first=1)
    sparse_transformer = (band(127, 0) | strided(128)) & causal()

Windows are one-sided distances: `band(left, right)` reads `left + right + 1` keys, the query's own included. A causal
window of `w` keys is `band(w - 1, 0)`.

Further patterns, two-dimensional ones for instance, subclass [`Pattern`]: `allows` and `may` are enough for
correct block-sparse attention, a bounded `span` makes the walk over it cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pattern_atoms import (
    Band,
    BlockLocal,
    BlockRing,
    Positions,
    RandomBlocks,
    Residue,
    ShareBand,
    SummaryColumns,
)
from .pattern_base import Everything, Pattern, PerHead

__all__ = [
    "FULL",
    "Pattern",
    "band",
    "block_local",
    "block_ring",
    "causal",
    "dilated",
    "fixed",
    "full",
    "global_",
    "per_head",
    "random_blocks",
    "share_band",
    "strided",
    "summary_columns",
]


def _at_least(minimum: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, not {value!r}.")
        if value < minimum:
            raise ValueError(f"{name}={value} is too small; use an integer >= {minimum}.")


def full() -> Pattern:
    """Every key: dense attention."""
    return Everything()


FULL = full()  # built at import: torch.compile cannot trace it


def causal() -> Pattern:
    """Keys at or before the query."""
    return Band(None, 0)


def band(left: int | None, right: int | None) -> Pattern:
    """Sliding window: the keys `q - left .. q + right`; None means no bound on that side.

    Raises:
        ValueError: a bound is negative.
        TypeError: a bound is neither an int nor None.
    """
    _at_least(0, left=left, right=right)
    return Everything() if left is None and right is None else Band(left, right)


def share_band(share: float) -> Pattern:
    """Sliding window whose width is a part of the text: keys at most `ceil(share * length)` tokens away, on both
    sides; the engine takes a row's length without its padding.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} is no part of a text; use a number above 0 and at most 1.")
    return ShareBand(float(share))


def strided(stride: int) -> Pattern:
    """Keys at a distance that is a multiple of `stride`, on both sides (Sparse Transformer, the strided A2).

    With `causal()` it is the set of Child et al. 2019 (arXiv 1904.10509). `stride=1` is dense attention.
    """
    _at_least(1, stride=stride)
    return Everything() if stride == 1 else Residue(stride)


def dilated(left: int, right: int, gap: int) -> Pattern:
    """Window with holes: the keys `q + gap * t` for `-left <= t <= right`; `gap=1` is `band(left, right)`.

    Longformer's paper counts the hole, so its dilation `d` is `gap=d + 1`.
    """
    _at_least(0, left=left, right=right)
    _at_least(1, gap=gap)
    return band(left * gap, right * gap) & strided(gap)


def block_local(block: int, before: int = 0, after: int = 0) -> Pattern:
    """Own block of `block` tokens, and as many whole blocks `before` and `after` it."""
    _at_least(1, block=block)
    _at_least(0, before=before, after=after)
    return BlockLocal(block, before, after)


def block_ring(block: int, before: int = 0, after: int = 0) -> Pattern:
    """[`block_local`] in a ring: the block before the first is the last one of the text."""
    _at_least(1, block=block)
    _at_least(0, before=before, after=after)
    return BlockRing(block, before, after)


def summary_columns(stride: int, width: int, group: int = 0) -> Pattern:
    """The last `width` positions of every block of `stride` tokens, for all queries (Sparse Transformer, fixed A2).

    `group=g` takes the `g`-th run of `width` columns counted from the end of the block, so that heads can differ.
    Queries of the first block may have an empty set under `causal()`.
    """
    _at_least(1, stride=stride, width=width)
    _at_least(0, group=group)
    if width * (group + 1) > stride:
        raise ValueError(f"group {group} of width {width} does not fit into a stride of {stride}; lower one of them.")
    return SummaryColumns(stride, stride - (group + 1) * width, stride - 1 - group * width)


def fixed(stride: int, width: int, group: int = 0) -> Pattern:
    """Own block of `stride` tokens together with [`summary_columns`] (Sparse Transformer, merged fixed head)."""
    return block_local(stride) | summary_columns(stride, width, group)


def global_(
    first: int = 0, last: int = 0, positions: Sequence[int] = (), *, rows: bool = True, columns: bool = True
) -> Pattern:
    """Global tokens at fixed positions: they read every key (`rows`) and every query reads them (`columns`).

    `first` and `last` count tokens at the two ends of the sequence; `positions` are further single positions, negative
    ones counted from the end, which the engine takes to be a row's last real token.
    """
    _at_least(0, first=first, last=last)
    intervals: list[tuple[int, int | None]] = []
    if first:
        intervals.append((0, first))
    if last:
        intervals.append((-last, None))
    intervals += [(position, position + 1 if position != -1 else None) for position in positions]
    if not intervals:
        raise ValueError("global_ names no position; give first, last or positions.")
    if not rows and not columns:
        raise ValueError("global_(rows=False, columns=False) is an empty pattern; set at least one of them.")
    key, query = Positions("key", tuple(intervals)), Positions("query", tuple(intervals))
    if rows and columns:
        return key | query
    return key if columns else query


def random_blocks(
    count: int,
    block: int,
    *,
    seed: int = 0,
    causal: bool = False,
    before: int = 0,
    after: int = 0,
    first: int = 0,
    last: int = 0,
    vary_heads: bool = True,
) -> Pattern:
    """Each block of `block` queries reads `count` distinct key blocks, drawn uniformly from its legal set
    among the blocks of the text, which the engine counts up to a row's last real token.

    The draw is a hash of (seed, layer, head, query block): the same in training and evaluation, after a reload, on
    every device, and without touching any global random state. `block=1` draws single keys.

    Args:
        count: draws per query block; where fewer are legal, all legal ones are taken.
        seed: any integer of 64 bits.
        causal: draw among the blocks up to the query's own; the draw then does not depend on the length.
        before, after: exclude that many blocks on each side of the query's own, which is excluded too (a window covers
            them). `before=after=-1` excludes nothing; with `causal` then intersect with `causal()`.
        first, last: blocks at both ends that are global already. `last` has no effect with `causal`.
        vary_heads: draw anew for every head.
    """
    _at_least(0, count=count, first=first, last=last)
    _at_least(-1, before=before, after=after)
    _at_least(1, block=block)
    if (before == -1) != (after == -1):
        raise ValueError(f"before={before}, after={after}: to admit a query's own block, set both to -1.")
    return RandomBlocks(count, block, seed, causal, before, after, first, last, vary_heads)


def per_head(*patterns: Pattern) -> Pattern:
    """Head `h` uses `patterns[h]`; heads with equal patterns are computed together."""
    if not patterns:
        raise ValueError("per_head needs one pattern per head, got none.")
    return PerHead(tuple(patterns))
