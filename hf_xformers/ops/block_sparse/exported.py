# SPDX-License-Identifier: Apache-2.0
"""The engine as tensor operations alone, for graphs that other runtimes read and that take texts of any length.

Queries stand in blocks of a fixed size. With each block goes one list of keys: those around it, as many as the pattern
reaches, and the few that all queries read. Which they are follows from block numbers, so that nothing depends on the
length but the number of blocks; which of them a query reads, the pattern says. A few queries that read the whole text
are rows of their own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.products import widened
from .pattern_atoms import BlockSets, Positions, SummaryColumns
from .pattern_base import Pattern
from .plan import BLOCK_SIZES, HALF_SPEED_ROWS

# Up to this many queries are rows that read everything, whatever the pattern.
FEW_ROWS = 64
_MOST_PHASES = 64

Interval = tuple[int, int | None]
Inputs = tuple[Tensor, Tensor, Tensor]


class Hidden(NamedTuple):
    """What a call adds to the pattern: padding [B, T_k] (True = real), numbers of documents [B, T_k], the lengths of
    texts [B], further keys and values [B, H, S, d] with who reads them ([B, S] or [B, T_q, S]), a bias on scores, and
    a cap on them (0: none). keys: T_k."""

    keys: Any
    key_mask: Tensor | None
    segment_ids: Tensor | None
    lengths: Tensor | None
    side: tuple[Tensor | None, Tensor | None, Tensor | None]
    score_bias: Callable[[Tensor, Tensor], Tensor] | None
    cap: float


@dataclass(frozen=True)
class Walk:
    """How the blocks of a pattern find their keys.

    Block i of `size` queries reads `width` keys from `size * i + lows[i % len(lows)]` on; with a gap, both are counted
    within the tokens of a residue class. Next to them: the positions in `columns`, `summaries` and the blocks of
    `sets`, for all queries. The queries in `rows` read what the pattern says of the whole text.
    """

    pattern: Pattern
    size: int
    lows: tuple[int, ...]
    width: int
    gap: int
    columns: tuple[Interval, ...]
    summaries: tuple[SummaryColumns, ...]
    sets: tuple[BlockSets, ...]
    rows: tuple[Interval, ...]


def exported_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, offsets: tuple[Any, Any], scale: float, hidden: Hidden
) -> tuple[Tensor, Tensor] | None:
    """Attention over a pattern, causal order included, in operations that a graph of any length can hold.

    Args:
        query, key, value: [B, H, T_q, d], [B, K, T_k, d] and [B, K, T_k, d_v]; K divides H.
        offsets: positions of the first query and the first key.

    Returns:
        [B, H, T_q, d_v] and the logarithm of the denominators [B, H, T_q] (-inf for a row without a key); None where
        the pattern has no such form: its keys are neither near nor few.
    """
    if query.shape[1] != key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        side_key, side_value, seen = hidden.side
        if side_key is not None and side_value is not None:
            side = (side_key.repeat_interleave(groups, 1), side_value.repeat_interleave(groups, 1), seen)
            hidden = hidden._replace(side=side)
    dtype, (query, key, value) = query.dtype, widened(query * scale, key, value)
    queries, keys = query.shape[2], key.shape[2]
    of_heads = [pattern.for_head(head) for head in range(query.shape[1])]
    runs = [(each, len(list(run))) for each, run in itertools.groupby(of_heads)]
    whole = _surely_equal(*offsets) and _surely_equal(queries, keys)
    walks = [walk_of(each) if whole else None for each, _ in runs]
    few = isinstance(queries, int) and queries <= FEW_ROWS
    if None in walks and not few:
        return None
    found, first = [], 0
    for (each, count), walk in zip(runs, walks, strict=True):
        heads = slice(first, first + count)
        inputs, first = (query[:, heads], key[:, heads], value[:, heads]), first + count
        if walk is None:
            index = torch.arange(queries, device=query.device)[None, None]
            found.append(_rows(inputs, each, index, offsets, hidden, heads))
        else:
            found.append(_blocks(inputs, walk, offsets, hidden, heads))
    out, lse = (torch.cat(x, 1) if len(x) > 1 else x[0] for x in zip(*found))
    return out.to(dtype), lse


def _whole(length: Any, size: int) -> Any:
    """How many blocks of that size hold a text. ONNX divides towards zero, and so only what is not negative."""
    return (length + (size - 1)) // size


def _surely_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are the same in every call of a graph."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return str(left) == str(right)  # one symbol; asking whether two are equal would make them so


@functools.lru_cache(64)
def walk_of(pattern: Pattern) -> Walk | None:
    """How the blocks of a pattern of one head find their keys; None where these are neither near nor few."""
    spans: list[Pattern] = []
    columns: dict[Interval, None] = {}
    rows: dict[Interval, None] = {}
    summaries: dict[SummaryColumns, None] = {}
    sets: dict[BlockSets, None] = {}
    for atoms in pattern.terms():
        term = functools.reduce(lambda a, b: a & b, atoms)
        own = [atom for atom in atoms if atom.layout == term.layout]
        if term.layout == "span":
            spans.append(term)
        elif isinstance(own[0], Positions):
            if not all(_few(interval) for interval in own[0].intervals):
                return None
            (rows if term.layout == "rows" else columns).update(dict.fromkeys(own[0].intervals))
        elif isinstance(own[0], SummaryColumns):
            summaries[own[0]] = None
        elif isinstance(own[0], BlockSets):
            sets[own[0]] = None
        else:
            return None
    if not (spans or columns or summaries or sets):
        return None
    kinds = tuple(columns), tuple(summaries), tuple(sets), tuple(rows)
    sizes, gaps = {each.block for each in sets}, {term.gap for term in spans}
    gap = gaps.pop() if len(gaps) == 1 and not (sets or summaries) else 1
    if len(sizes) > 1 or any(term.period == 0 or None in term.span(0, 0) for term in spans):
        return None
    period = math.lcm(*(term.period for term in spans)) if spans else 1
    best: tuple[float, Walk] | None = None
    for size in sizes or BLOCK_SIZES:
        phases = math.lcm(period, size) // size
        if phases > _MOST_PHASES or (gap > 1 and period > 1):
            continue
        lows, width = _near(spans, size, phases, gap)
        work = (width + 16) * (1 + HALF_SPEED_ROWS / size)
        if best is None or work < best[0]:
            best = work, Walk(pattern, size, lows, width, gap, *kinds)
    return None if best is None else best[1]


def traced_length(pattern: Pattern, heads: int) -> int:
    """How many tokens a text has at least that is more than one block, for every head."""
    walks = [walk_of(each) for each in {pattern.for_head(head) for head in range(heads)}]
    return max(1 if walk is None else walk.size * walk.gap + 1 for walk in walks)


def _few(interval: Interval) -> bool:
    """Whether an interval of positions has as many of them in every text."""
    start, stop = interval
    return (start < 0) if stop is None else (start < 0) == (stop < 0)


def _near(spans: list[Pattern], size: int, phases: int, gap: int) -> tuple[tuple[int, ...], int]:
    """How far before the first query of a block its keys begin, for each phase of the period; how many they are."""
    if not spans:
        return (0,), 0
    lows, width = [], 0
    for phase in range(phases):
        first = phase * size
        ends: list[Any] = [term.span(first * gap, (first + size - 1) * gap) for term in spans]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        low, high = -(-low // gap), high // gap
        lows.append(low - first)
        width = max(width, high - low + 1)
    return tuple(lows), width


def _blocks(
    inputs: Inputs, walk: Walk, offsets: tuple[Any, Any], hidden: Hidden, heads: slice
) -> tuple[Tensor, Tensor]:
    """Whole texts: every query, and as many keys."""
    (query, key, value), length, device = inputs, inputs[0].shape[2], inputs[0].device
    q_at = _queries(walk, length, device)
    k_at, valid = _keys(walk, length, q_at, hidden.lengths)
    q_at = q_at.clamp(max=length - 1)[None]
    seen = _seen(walk.pattern, q_at, k_at, offsets, hidden, heads)
    seen = seen._replace(allowed=seen.allowed & valid[:, :, None])
    out, lse = _softmax(_at(query, q_at), _at(key, k_at), _at(value, k_at), seen, hidden.cap)
    order = torch.arange(length, device=device)
    if walk.gap > 1:  # a token's class, then its place in it
        order = order % walk.gap * (q_at.shape[1] // walk.gap * walk.size) + order // walk.gap
    out, lse = (x.flatten(2, 3).index_select(2, order) for x in (out, lse))
    if not walk.rows:
        return out, lse
    # Where a text is shorter than they are many, some are the same row.
    places = [_places(interval, hidden.lengths, length, device) for interval in walk.rows]
    index = torch.cat(_one_batch(places, hidden.lengths), 1)
    index = index.clamp(min=0).clamp(max=length - 1)[:, None]
    rows = _at(query, index)[:, :, 0], key, value
    own_out, own_lse = _rows(rows, walk.pattern, index, offsets, hidden, heads)
    index = index.expand_as(own_lse)
    return out.scatter(2, index[..., None].expand_as(own_out), own_out), lse.scatter(2, index, own_lse)


def _rows(
    inputs: Inputs, pattern: Pattern, index: Tensor, offsets: tuple[Any, Any], hidden: Hidden, heads: slice
) -> tuple[Tensor, Tensor]:
    """A few queries, number `index` [B or 1, 1, n] of the call, and all keys."""
    query, key, value = (x[:, :, None] for x in inputs)
    keys = torch.arange(key.shape[3], device=key.device)[None, None]
    out, lse = _softmax(query, key, value, _seen(pattern, index, keys, offsets, hidden, heads), hidden.cap)
    return out[:, :, 0], lse[:, :, 0]


def _queries(walk: Walk, length: Any, device: torch.device) -> Tensor:
    """Positions of queries, [blocks, size]; the last of a text (of a class) are beyond its end."""
    if walk.gap == 1:
        numbers = torch.arange(_whole(length, walk.size), device=device)[:, None]
        return numbers * walk.size + torch.arange(walk.size, device=device)
    each = _whole(_whole(length, walk.gap), walk.size)
    within = torch.arange(each, device=device)[:, None] * walk.size + torch.arange(walk.size, device=device)
    return (torch.arange(walk.gap, device=device)[:, None, None] + walk.gap * within).flatten(0, 1)


def _keys(walk: Walk, length: Any, q_at: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions of the keys of each block, [B or 1, blocks, width], none outside of the text, and whether each counts:
    it is in the text, and not a second time in the list."""
    device, blocks, gap = q_at.device, q_at.shape[0], walk.gap
    found: list[Tensor] = []
    counts: list[Tensor] = []
    first = q_at[:, 0]
    start, width = torch.zeros_like(first), 0
    if walk.width:
        many = length if gap == 1 else _whole(length, gap)
        width = torch.sym_min(walk.width, many)
        numbers = first // gap // walk.size
        lows = torch.tensor(walk.lows, device=device)[numbers % len(walk.lows)] if len(walk.lows) > 1 else walk.lows[0]
        start = torch.minimum((first // gap + lows).clamp(min=0), torch.full_like(first, many - width))
        near = first[:, None] % gap + gap * (start[:, None] + torch.arange(width, device=device))
        found.append(near[None])
        counts.append((near < length)[None])

    def outside(at: Tensor) -> Tensor:
        """Whether the keys around the block hold a position [.., blocks or 1, n]."""
        within, begin = at // gap, start[:, None]
        same = True if gap == 1 else (at - first[:, None]) % gap == 0
        return ~((within >= begin) & (within < begin + width) & same)

    earlier: list[Callable[[Tensor], Tensor]] = []  # what positions before those that are being listed hold
    for interval in walk.columns:
        places = _places(interval, lengths, length, device)
        real = (places >= 0) & (places < length)
        for held in earlier:
            real = real & ~held(places)
        earlier.append(functools.partial(_between, low=places[:, :1], high=places[:, -1:]))
        found.append(places[:, None].expand(-1, blocks, -1))
        counts.append(real[:, None] & outside(places[:, None]))
    for summary in walk.summaries:
        columns = torch.arange(summary.first, summary.last + 1, device=device)
        columns = (
            torch.arange(_whole(length, summary.stride), device=device)[:, None] * summary.stride + columns
        ).flatten()
        real = columns < length
        for held in earlier:
            real = real & ~held(columns[None])
        earlier.append(functools.partial(_in_columns, summary))
        found.append(columns[None, None].expand(1, blocks, -1))
        counts.append(real.reshape(-1, 1, columns.shape[0]) & outside(columns[None, None]))
    if walk.sets:
        of_sets = [_slots(each, blocks, lengths, length, device) for each in walk.sets]
        slots = torch.cat(_one_batch(of_sets, lengths), -1)
        again = (slots[..., :, None] == slots[..., None, :]).tril(-1).any(-1)
        places = (slots[..., None] * walk.size + torch.arange(walk.size, device=device)).flatten(-2)
        real = ((slots >= 0) & ~again)[..., None].expand(-1, -1, -1, walk.size).flatten(-2) & (places < length)
        for held in earlier:
            real = real & ~held(places.flatten(1)).reshape(-1, *places.shape[1:])
        found.append(places)
        counts.append(real & outside(places))
    at, counted = (x[0] if len(x) == 1 else torch.cat(_one_batch(x, lengths), -1) for x in (found, counts))
    return at.clamp(min=0).clamp(max=length - 1), counted


def _one_batch(parts: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
    """Parts [B or 1, ..], each for all rows if one is."""
    if lengths is None or all(isinstance(x.shape[0], int) and x.shape[0] == 1 for x in parts):
        return parts
    return [x.expand(lengths.shape[0], *x.shape[1:]) for x in parts]


def _places(interval: Interval, lengths: Tensor | None, length: Any, device: torch.device) -> Tensor:
    """The positions of an interval, [B or 1, n]; negative where a text has not as many."""
    start, stop = interval
    if start >= 0:
        return torch.arange(start, stop or start, device=device)[None]
    end = torch.full((1,), length, device=device) if lengths is None else lengths
    return end[:, None] + torch.arange(start, stop or 0, device=device)


def _between(at: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (at >= low) & (at <= high)


def _in_columns(summary: SummaryColumns, at: Tensor) -> Tensor:
    return summary.allows(at, at)


def _slots(blocks: BlockSets, count: Any, lengths: Tensor | None, length: Any, device: torch.device) -> Tensor:
    """The key blocks of each of the query blocks, [B or 1, blocks, n]; -1: none."""
    rows = torch.arange(count, device=device)[None]
    end = torch.full((1,), length, device=device) if lengths is None else lengths
    return torch.stack(blocks.drawn_within(rows, end[:, None]), -1)


class Seen(NamedTuple):
    """Which keys queries read [B or 1, n, q, k], the bias of their scores [B or 1, H or 1, n, q, k] or None, further
    keys and values [B, H, n, S, d] or None, and which of them are read [B, n, q or 1, S]."""

    allowed: Tensor
    bias: Tensor | None
    side: tuple[Tensor, Tensor, Tensor] | None


def _seen(
    pattern: Pattern, q_at: Tensor, k_at: Tensor, offsets: tuple[Any, Any], hidden: Hidden, heads: slice
) -> Seen:
    """For blocks of queries, number `q_at` [B or 1, n, q] of a call, and their keys `k_at` [B or 1, n, k]."""
    q_place, k_place = q_at + offsets[0], k_at + offsets[1]
    pair = q_place[..., None], k_place[:, :, None]
    if pattern.needs_length:
        end = k_at.new_full((1,), offsets[1] + hidden.keys) if hidden.lengths is None else hidden.lengths
        allowed = pattern.allows_within(*pair, end[:, None, None, None])
    else:
        allowed = pattern.allows(*pair)
    if hidden.key_mask is not None:
        allowed = allowed & _listed(hidden.key_mask, k_at)[:, :, None]
    if hidden.segment_ids is not None:
        own = _listed(hidden.segment_ids, q_at + (offsets[0] - offsets[1]))
        allowed = allowed & (own[..., None] == _listed(hidden.segment_ids, k_at)[:, :, None])
    bias = None
    if hidden.score_bias is not None:
        bias = hidden.score_bias(q_place, k_place).transpose(1, 2)  # [B or 1, n, H, q, k]
        bias = bias[:, heads] if bias.shape[1] > 1 else bias
    key, value, mask = hidden.side
    if key is None or value is None:
        return Seen(allowed, bias, None)
    if mask is None:
        mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool)
    if mask.ndim == 2:
        mask = mask[:, None, None]
    else:
        each = q_at.expand(mask.shape[0], -1, -1)
        index = each.flatten(1)[..., None].expand(-1, -1, mask.shape[2])
        mask = mask.gather(1, index).reshape(*each.shape, mask.shape[2])
    key, value = (x[:, heads, None].expand(-1, -1, q_at.shape[1], -1, -1) for x in widened(key, value))
    return Seen(allowed, bias, (key, value, mask))


def _softmax(query: Tensor, key: Tensor, value: Tensor, seen: Seen, cap: float) -> tuple[Tensor, Tensor]:
    """[B, H, n, q, d_v], and the logarithm of the denominators [B, H, n, q]."""
    allowed, bias, many = seen.allowed, seen.bias, 0
    if seen.side is not None:
        more_key, more_value, mask = seen.side
        key, value, many = torch.cat([key, more_key], 3), torch.cat([value, more_value], 3), more_key.shape[3]
        shape = mask.shape[0], *allowed.shape[1:3]
        allowed = torch.cat([allowed.expand(*shape, -1), mask.expand(*shape, -1)], -1)
    scores = query @ key.mT
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + (nn.functional.pad(bias, (0, many)) if many else bias)
    # Added, as a runtime chooses slowly between two tensors; made once for all heads, and of equal layers.
    lowest = torch.finfo(scores.dtype).min / 2
    scores = scores + torch.zeros_like(allowed, dtype=scores.dtype).masked_fill(~allowed, lowest)[:, None]
    empty = ~allowed.any(-1)[:, None]
    out = (scores.softmax(-1) @ value).masked_fill(empty[..., None], 0.0)
    return out, scores.logsumexp(-1).masked_fill(empty, -math.inf)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """[B, H, T, d], [B or 1, n, m] -> [B, H, n, m, d]."""
    shape = *x.shape[:2], *index.shape[1:], x.shape[3]
    if index.shape[0] == 1:
        return x.index_select(2, index.flatten()).reshape(shape)
    return x.gather(2, index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])).reshape(shape)


def _listed(x: Tensor, index: Tensor) -> Tensor:
    """[B, T], [B or 1, n, m] -> [B, n, m]."""
    shape = x.shape[0], *index.shape[1:]
    if index.shape[0] == 1:
        return x.index_select(1, index.flatten()).reshape(shape)
    return x.gather(1, index.flatten(1)).reshape(shape)
