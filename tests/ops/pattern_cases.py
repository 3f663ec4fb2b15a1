"""Every pattern beside its definition in plain Python: `allowed(i, j, T)` for query i and key j of T tokens."""

from __future__ import annotations

from collections.abc import Callable

from hf_xformers.ops.block_sparse.pattern_images import block_memory, block_plane
from hf_xformers.ops.block_sparse.patterns import (
    Pattern,
    band,
    block_local,
    block_ring,
    causal,
    dilated,
    fixed,
    full,
    global_,
    random_blocks,
    share_band,
    strided,
    summary_columns,
)

Rule = Callable[[int, int, int], bool]


def near_before(i: int, j: int, length: int, size: int, before: int) -> bool:
    blocks = -(-length // size)
    return j // size in [(i // size - back) % blocks for back in range(before + 1)]


def global_three(i: int, j: int, length: int) -> bool:
    chosen = {0, 1, length - 1, 7}
    return i in chosen or j in chosen


def near_on_plane(i: int, j: int, columns: int, block: tuple[int, int], around: tuple[int, int, int]) -> bool:
    """Whether cell j lies in the block of cell i, or in the flange above, below and beside it."""
    (row, column), (height, width), (above, below, beside) = divmod(i, columns), block, around
    top, left = row // height * height, column // width * width
    inside = left - beside <= j % columns < left + width + beside
    return inside and top - above <= j // columns < top + height + below


def by_block(place: int, columns: int, block: tuple[int, int]) -> int:
    """The cell, counted row by row, at a place of a sequence that goes block by block."""
    height, width = block
    corners = [(top, left) for top in range(0, 60, height) for left in range(0, columns, width)]
    top, left = corners[place // (height * width)]
    down, right = divmod(place % (height * width), width)
    return (top + down) * columns + left + right


CASES: dict[str, tuple[Pattern, Rule]] = {
    "block_memory": (block_memory(6, 4), lambda i, j, t: i // 6 * 6 - 4 <= j < i // 6 * 6 + 6),
    "block_memory_both": (block_memory(4, 7, 3), lambda i, j, t: i // 4 * 4 - 7 <= j < i // 4 * 4 + 7),
    "plane_raster": (
        block_plane(9, (2, 3), (1, 2), order="raster", below=False),
        lambda i, j, t: near_on_plane(i, j, 9, (2, 3), (1, 0, 2)),
    ),
    "plane_raster_below": (
        block_plane(6, (1, 2), (2, 1), order="raster"),
        lambda i, j, t: near_on_plane(i, j, 6, (1, 2), (2, 2, 1)),
    ),
    "plane_blocks": (
        block_plane(9, (2, 3), (2, 3), below=False) & causal(),
        lambda i, j, t: j <= i and near_on_plane(by_block(i, 9, (2, 3)), by_block(j, 9, (2, 3)), 9, (2, 3), (2, 0, 3)),
    ),
    "plane_blocks_below": (
        block_plane(8, (2, 2), (4, 2)),
        lambda i, j, t: near_on_plane(by_block(i, 8, (2, 2)), by_block(j, 8, (2, 2)), 8, (2, 2), (4, 4, 2)),
    ),
    "full": (full(), lambda i, j, t: True),
    "causal": (causal(), lambda i, j, t: j <= i),
    "band": (band(3, 2), lambda i, j, t: i - 3 <= j <= i + 2),
    "window": (band(6, 0), lambda i, j, t: 0 <= i - j < 7),
    "one_sided": (band(None, 4), lambda i, j, t: j <= i + 4),
    "share": (share_band(0.125), lambda i, j, t: abs(i - j) <= -(-t // 8)),
    "dilated": (dilated(2, 1, 5), lambda i, j, t: j in (i - 10, i - 5, i, i + 5)),
    "strided": (strided(7), lambda i, j, t: abs(i - j) % 7 == 0),
    "strided_causal": (strided(6) & causal(), lambda i, j, t: j <= i and (i - j) % 6 == 0),
    "block_local": (block_local(8), lambda i, j, t: i // 8 == j // 8),
    "block_neighbours": (block_local(5, 2, 1), lambda i, j, t: j // 5 - i // 5 in (-2, -1, 0, 1)),
    "block_ring": (block_ring(5, 1, 1), lambda i, j, t: near_before(i, j, t, 5, 1) or near_before(j, i, t, 5, 1)),
    "block_ring_before": (block_ring(8, 2), lambda i, j, t: near_before(i, j, t, 8, 2)),
    "summary": (summary_columns(6, 2), lambda i, j, t: j % 6 >= 4),
    "summary_group": (summary_columns(8, 2, group=1), lambda i, j, t: j % 8 in (4, 5)),
    "fixed": (fixed(8, 3) & causal(), lambda i, j, t: j <= i and (i // 8 == j // 8 or j % 8 >= 5)),
    "fixed_columns_only": (summary_columns(8, 3) & causal(), lambda i, j, t: j <= i and j % 8 >= 5),
    "sparse_transformer": (
        (band(4, 0) | strided(5)) & causal(),
        lambda i, j, t: j <= i and (i - j < 5 or (i - j) % 5 == 0),
    ),
    "longformer_fixed": (
        band(3, 3) | global_(first=2, last=1, positions=[7]),
        lambda i, j, t: abs(i - j) <= 3 or global_three(i, j, t),
    ),
    "sinks": (
        (band(4, 0) | global_(first=3, rows=False)) & causal(),
        lambda i, j, t: j <= i and (i - j <= 4 or j < 3),
    ),
    "rows_only": (global_(positions=[2], columns=False), lambda i, j, t: i == 2),
    "ring_and_band": (
        block_ring(5, 2) | band(6, 6),
        lambda i, j, t: near_before(i, j, t, 5, 2) or abs(i - j) <= 6,
    ),
    "ring_causal": (block_ring(5, 1) & causal(), lambda i, j, t: near_before(i, j, t, 5, 1) and j <= i),
    "ring_difference": (  # some queries read nothing
        block_ring(8, 1) & ~band(8, 8),
        lambda i, j, t: near_before(i, j, t, 8, 1) and abs(i - j) > 8,
    ),
    "overlapping": (
        band(4, 4) | block_local(8) | strided(4) | band(2, 6),
        lambda i, j, t: abs(i - j) <= 4 or i // 8 == j // 8 or (i - j) % 4 == 0 or -2 <= j - i <= 6,
    ),
    "complement": (~band(2, 2), lambda i, j, t: abs(i - j) > 2),
    "difference": (block_local(16) & ~band(1, 1), lambda i, j, t: i // 16 == j // 16 and abs(i - j) > 1),
    "holes": (dilated(3, 3, 2) | dilated(1, 1, 9), lambda i, j, t: j - i in (-9, -6, -4, -2, 0, 2, 4, 6, 9)),
}

# No rule in plain Python for these: they are random; their own tests check what they draw.
RANDOM: dict[str, Pattern] = {
    "random": random_blocks(2, 4, seed=3),
    "random_tokens": random_blocks(3, 1, seed=1, causal=True, before=-1, after=-1) & causal(),
    "bigbird": block_local(4, 1, 1)
    | global_(first=4, last=4)
    | random_blocks(2, 4, before=1, after=1, first=1, last=1, vary_heads=False),
}
