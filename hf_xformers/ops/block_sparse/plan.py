# SPDX-License-Identifier: Apache-2.0
"""How the block-sparse engine walks a pattern: parts with disjoint key sets, each a list of equal-shaped tiles.

A tile is a small dense problem, `rows` queries against `width` keys. Tiles of equal shape whose positions form an
arithmetic progression are one [`Tiles`] object: the engine reads them as an overlapping strided view, so no key is
copied, and computes them with one batched matrix product. Plans depend on pattern and lengths only and are cached.

Four layouts:

- span: the keys of a query block form one interval (bands, blocks, dense). With `gap = g` the tokens of a residue
  class mod g are the sequence, and the classes are a further batch dimension; that makes dilated and strided patterns
  bands.
- columns: few keys for all queries. They are gathered once and become a short key sequence of their own.
- rows: few queries. Gathered likewise.
- blocks: a table of key blocks per query block, from the pattern's arithmetic on block numbers; gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator

import torch

from ..common.kept import kept
from .pattern_base import Intersection, Pattern
from .tiles import Axis, Part, Tiles

# Elements of one score buffer (2 MiB in float32): large enough to amortize a Python step, small enough for the cache.
TILE_BUDGET = 1 << 19
# Query rows at which a batched product runs at half its full speed; from measurements on one AVX-512 core.
HALF_SPEED_ROWS = 8
BLOCK_SIZES = (16, 32, 64, 128, 256, 512)


@kept(256)
def make_plan(pattern: Pattern, q_len: int, k_len: int, q_offset: int = 0, k_offset: int = 0) -> tuple[Part, ...]:
    """Parts whose disjoint key sets make up `pattern` (bound, of one head) on the given stretch of queries and
    keys."""
    terms = [functools.reduce(lambda a, b: a & b, atoms) for atoms in pattern.terms()]
    by_layout: dict[str, list[Pattern]] = defaultdict(list)
    for term in dict.fromkeys(terms):
        by_layout[term.layout].append(term)
    queries, keys = Axis(q_len, q_offset), Axis(k_len, k_offset)
    # Columns first: what they hold must be cut out of the others, and they touch few of the others' tiles.
    ordered = [("columns", term, 1) for term in by_layout["columns"]]
    ordered += [("rows", term, 1) for term in by_layout["rows"]]
    ordered += [("span", merged, gap) for gap, merged in _merge_spans(by_layout["span"], queries, keys)]
    blocks: dict[int, list[Pattern]] = defaultdict(list)
    for term in by_layout["blocks"]:
        atoms = term.parts if isinstance(term, Intersection) else (term,)
        own = [atom.block for atom in atoms if atom.layout == "blocks" and atom.block is not None]
        blocks[min(own) if own else 64].append(term)
    ordered += [("blocks", _union(group), size) for size, group in blocks.items()]

    parts: list[Part] = []
    taken: list[Pattern] = []
    for layout, term, number in ordered:
        part = Part(term, _union(taken) if taken else None, queries, keys)
        taken.append(term)
        if layout == "blocks":
            part.tiles = list(_block_tiles(part, number))
        else:
            columns = term.columns(k_offset + k_len) if layout == "columns" else None
            rows = term.rows(q_offset + q_len) if layout == "rows" else None
            if columns is not None:
                listed = columns[columns >= k_offset]
                part.columns, part.k_axis = listed - k_offset, Axis(len(listed), listed=listed)
            if rows is not None:
                listed = rows[rows >= q_offset]
                part.rows, part.q_axis = listed - q_offset, Axis(len(listed), listed=listed)
            part.tiles = list(_span_tiles(part, number))
        if part.tiles:
            parts.append(part)
    return tuple(parts)


def _union(terms: list[Pattern]) -> Pattern:
    return functools.reduce(lambda a, b: a | b, terms)


def _width(term: Pattern, queries: Axis, keys: Axis) -> int:
    """Keys between the first and the last that a query in the middle reads."""
    middle = queries.position(queries.length // 2)
    low, high = term.span(middle, middle)
    low = keys.start if low is None else max(low, keys.start)
    high = keys.position(keys.length - 1) if high is None else min(high, keys.position(keys.length - 1))
    return max(high - low + 1, 0)


def _merge_spans(terms: list[Pattern], queries: Axis, keys: Axis) -> Iterator[tuple[int, Pattern]]:
    """Group span terms by gap; merge those whose common interval is not wider than they are one by one."""
    merged: list[Pattern] = []
    for term in sorted(terms, key=lambda term: -_width(term, queries, keys)):
        width = _width(term, queries, keys)
        if term.gap > 1 and term.period == 1 and width > 4 * BLOCK_SIZES[0]:
            yield term.gap, term
            continue
        for index, other in enumerate(merged):
            together = _width(term | other, queries, keys)
            if together <= width + _width(other, queries, keys) + BLOCK_SIZES[0]:
                merged[index] = term | other
                break
        else:
            merged.append(term)
    yield from ((1, term) for term in merged)


def _classes(queries: Axis, keys: Axis, gap: int) -> Iterator[tuple[int, Axis, int, Axis, int]]:
    """Runs of neighboring residue classes with equal lengths: (classes, query axis, first query, key axis, first
    key)."""
    described = []
    for q_first in range(min(gap, queries.length)):  # a class without queries has nothing to do
        k_first = (queries.start + q_first - keys.start) % gap
        q_count, k_count = (
            max(-((first - length) // gap), 0) for first, length in ((q_first, queries.length), (k_first, keys.length))
        )
        # Neighbors among the queries with equal distances to their first keys are neighbors among the keys too.
        described.append((q_first, q_count, k_count, k_first - q_first))
    for shape, run in itertools.groupby(described, key=lambda item: item[1:]):
        firsts = [item[0] for item in run]
        q_count, k_count, shift = shape
        if k_count:
            q_first, k_first = firsts[0], firsts[0] + shift
            q_axis = Axis(q_count, queries.start + q_first, gap)
            k_axis = Axis(k_count, keys.start + k_first, gap)
            yield len(firsts), q_axis, q_first, k_axis, k_first


def _interval(term: Pattern, q_axis: Axis, k_axis: Axis, first: int, last: int) -> tuple[int, int]:
    """Key indices [begin, end) that the queries `first..last` may read."""
    low, high = term.span(q_axis.position(first), q_axis.position(last))
    begin = 0 if low is None else k_axis.at_or_after(low)
    end = k_axis.length if high is None else k_axis.at_or_after(high + 1)
    return begin, max(end, begin)


def _query_blocks(term: Pattern, q_axis: Axis, k_axis: Axis) -> Iterator[tuple[int, int]]:
    """Cut the queries into blocks [begin, end) whose ends are multiples of the block size in absolute positions."""
    middle = q_axis.position(q_axis.length // 2)
    span = term.span(middle, middle)
    size = None if None in span else _best_size(term, q_axis, k_axis)
    # Where the interval grows with the position, sixteen steps waste little of the triangle.
    limit = q_axis.length if span == (None, None) else max(q_axis.length // 16, 64)
    begin = 0
    while begin < q_axis.length:
        if size is None:
            first, last = _interval(term, q_axis, k_axis, begin, min(begin + 64, q_axis.length) - 1)
            rows = max(min(TILE_BUDGET // max(last - first, 1), limit), 16)
        elif q_axis.listed is None:
            rows = size - (q_axis.start // q_axis.gap + begin) % size
        else:
            rows = size
        end = min(begin + rows, q_axis.length)
        yield begin, end
        begin = end


def _best_size(term: Pattern, q_axis: Axis, k_axis: Axis) -> int:
    """The block size with the least estimated work, judged at a few blocks in the middle of the sequence."""
    period = term.period
    sizes = set(BLOCK_SIZES)
    if period > 1:
        multiples = (period * factor for factor in (1, 2, 4, 8, 16, 32))
        sizes = {size for size in (*sizes, *multiples) if size <= 512 and (size % period == 0 or period % size == 0)}
        sizes = sizes or {min(period, 512)}

    def cost(size: int) -> float:
        middle = q_axis.length // 2 // size * size
        work = total = 0
        for begin in range(max(middle - 4 * size, 0), min(middle + 4 * size, q_axis.length), size):
            end = min(begin + size, q_axis.length)
            first, last = _interval(term, q_axis, k_axis, begin, end - 1)
            work += (end - begin) * (last - first)
            total += end - begin
        return (work / total + 16) * (1 + HALF_SPEED_ROWS / size)

    return min(sorted(sizes), key=cost)


def _span_tiles(part: Part, gap: int) -> Iterator[Tiles]:
    if part.q_axis.length == 0 or part.k_axis.length == 0:
        return
    if gap == 1:
        runs = iter([(1, part.q_axis, 0, part.k_axis, 0)])
    else:
        runs = _classes(part.q_axis, part.k_axis, gap)
    for classes, q_axis, q_first, k_axis, k_first in runs:
        blocks = []
        for begin, end in _query_blocks(part.pattern, q_axis, k_axis):
            first, last = _interval(part.pattern, q_axis, k_axis, begin, end - 1)
            if last > first:
                blocks.append((begin, end, first, last))
        shapes: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
        for (begin, end, first, last), touched in zip(blocks, _touched(part, q_axis, k_axis, blocks), strict=True):
            shapes[end - begin, last - first, first - begin, touched].append(begin)
        for (rows, width, shift, touched), begins in shapes.items():
            pattern = part.exact if touched else part.pattern
            for start, step, count in _progressions(begins):
                corner = (q_first + gap * start, k_first + gap * (start + shift))
                yield from _cut(part, pattern, corner, (rows, width), (classes, count), step, gap)


def _touched(part: Part, q_axis: Axis, k_axis: Axis, blocks: list[tuple[int, int, int, int]]) -> list[bool]:
    """For each block of queries: whether earlier parts may hold some of its pairs, which it must then leave out."""
    if part.taken is None or not blocks:
        return [False] * len(blocks)
    ends = [
        (q_axis.position(b), q_axis.position(e - 1), k_axis.position(f), k_axis.position(t - 1))
        for b, e, f, t in blocks
    ]
    q_lo, q_hi, k_lo, k_hi = torch.tensor(ends).T
    last = max(part.q_axis.gap, q_axis.gap) - 1  # the tile stands for all residue classes
    return part.taken.may(q_lo, q_hi + last, k_lo, k_hi + last).tolist()


def _progressions(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut an ascending list into arithmetic progressions (first, step, count)."""
    index = 0
    while index < len(numbers):
        end = index + 1
        step = numbers[end] - numbers[index] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        yield numbers[index], step, end - index
        index = end


def _cut(
    part: Part,
    pattern: Pattern,
    corner: tuple[int, int],
    shape: tuple[int, int],
    counts: tuple[int, int],
    step: int,
    gap: int,
) -> Iterator[Tiles]:
    """Tiles of one progression, cut so that the scores of each piece stay within the budget."""
    (rows, width), (classes, blocks) = shape, counts
    many = max(TILE_BUDGET // (rows * width), 1)
    class_run = min(classes, many)
    block_run = max(many // class_run, 1)
    listed = part.q_axis.listed is not None or part.k_axis.listed is not None
    for c in range(0, classes, class_run):
        for t in range(0, blocks, block_run):
            tiles = Tiles(
                rows=rows,
                width=width,
                q_start=corner[0] + c + gap * step * t,
                k_start=corner[1] + c + gap * step * t,
                classes=min(class_run, classes - c),
                blocks=min(block_run, blocks - t),
                step=step,
                gap=gap,
                pattern=pattern,
            )
            same_class = tiles.classes == 1 or pattern.period == 1
            same_block = tiles.blocks == 1 or (pattern.period > 0 and gap * step % pattern.period == 0)
            tiles.uniform = tiles.count == 1 or (same_class and same_block and not listed)
            if gap == 1 and tiles.uniform:
                _trim(part, tiles)
            if tiles.width:
                yield tiles


def _trim(part: Part, tiles: Tiles) -> None:
    """Cut off columns at both ends that no row may read, and note when no mask is needed at all."""
    q, k = part.positions(tiles, "q")[0], part.positions(tiles, "k")[0]
    columns = tiles.pattern.may(q[0], q[-1], k, k).nonzero().flatten()
    if len(columns) == 0:
        tiles.width = 0
        return
    first, last = int(columns[0]), int(columns[-1])
    tiles.k_start, tiles.width = tiles.k_start + first, last - first + 1
    k = k[first : last + 1]
    tiles.full = bool(tiles.pattern.covers(q[0], q[-1], k, k).all())


def _block_tiles(part: Part, size: int) -> Iterator[Tiles]:
    """Gathered tiles: the key blocks that the pattern may touch, query blocks with equal numbers of them together."""
    q_axis, k_axis, exact = part.q_axis, part.k_axis, part.exact
    if q_axis.length == 0 or k_axis.length == 0:
        return
    q_end, k_end = q_axis.start + q_axis.length, k_axis.start + k_axis.length
    q_blocks = torch.arange(q_axis.start // size, (q_end - 1) // size + 1)
    k_blocks = torch.arange(k_axis.start // size, (k_end - 1) // size + 1)
    strip = max((1 << 22) // len(k_blocks), 1)  # bounds the memory of the block map, whatever the length
    for rows_of_map in q_blocks.split(strip):
        q_lo = (rows_of_map * size).clamp(min=q_axis.start)
        q_hi = (rows_of_map * size + size).clamp(max=q_end) - 1
        table = part.pattern.key_blocks(rows_of_map, size)
        if table is None:
            table = k_blocks.expand(len(rows_of_map), -1)
        k_lo, k_hi = (table * size).clamp(min=k_axis.start), (table * size + size).clamp(max=k_end) - 1
        repeated = torch.zeros_like(table, dtype=torch.bool)
        table, order = table.sort(1)
        repeated[:, 1:] = table[:, 1:] == table[:, :-1]
        k_lo, k_hi = k_lo.gather(1, order), k_hi.gather(1, order)
        ends = (q_lo[:, None], q_hi[:, None], k_lo, k_hi)
        active = (k_lo <= k_hi) & (table >= 0) & ~repeated & exact.may(*ends)
        masked = (active & ~exact.covers(*ends)).any(1)
        counts = active.sum(1)
        table = torch.where(active, table, -1).sort(1, descending=True).values
        # Powers of 2**(1/4): few distinct widths, at most a fifth of filling.
        slots = torch.where(counts <= 8, counts, (2 ** ((4 * counts.log2()).ceil() / 4)).ceil().long())
        slots = slots.clamp(max=table.shape[1])
        kinds = torch.stack([q_hi - q_lo + 1, slots, masked.long()], 1)
        for rows, width, needs_mask in kinds.unique(dim=0).tolist():
            if width == 0:
                continue
            members = (kinds == torch.tensor([rows, width, needs_mask])).all(1).nonzero()[:, 0]
            for chosen in members.split(max(TILE_BUDGET // (max(rows, 64) * width * size), 1)):
                listed = table[chosen, :width]
                keys = (listed[:, :, None] * size + torch.arange(size)).flatten(1)
                valid = (listed >= 0).repeat_interleave(size, 1) & (keys >= k_axis.start) & (keys < k_end)
                yield Tiles(
                    rows=rows,
                    width=width * size,
                    blocks=len(chosen),
                    q_index=q_lo[chosen, None] - q_axis.start + torch.arange(rows),
                    k_index=keys.clamp(k_axis.start, k_end - 1) - k_axis.start,
                    k_valid=None if bool(valid.all()) else valid,
                    pattern=exact,
                    uniform=False,
                    full=not needs_mask,
                )
