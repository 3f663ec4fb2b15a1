# SPDX-License-Identifier: Apache-2.0
"""Score terms that depend on the distance of a pair alone, besides what one of its tokens brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.call import Call
from ..ops.common.constants import constant
from ..ops.common.shifted_rows import shift_rows
from ..ops.score_terms.terms import Pairs

# Vectors that [`pick_rows`] takes at least at a time: fewer do not multiply at full speed.
LEAST_VECTORS = 64


class Near(NamedTuple):
    """Keys `[first, stop)` that lie within reach of some query of a block. Of all the others the earlier ones share
    one row of a table, and so do the later ones."""

    first: int
    stop: int

    @classmethod
    def of(cls, context: Call, rows: slice, keys: int, reach: int) -> Near:
        """rows: queries of the block; keys: how many keys it reads; reach: distance (slots) from which all distances
        to a side count as one."""
        if context.static or torch.compiler.is_compiling():
            return cls(0, keys)  # slots are known to the device alone
        begin = context.key_index.shape[0] - context.query_index.shape[0] + rows.start
        first = min(max(begin - reach + 1, 0), keys)
        return cls(first, max(min(begin + rows.stop - rows.start - 1 + reach, keys), first))


def pick(products: Tensor, index: Tensor) -> Tensor:
    """products [..., t, n] of each query with n table rows, index [t, s] or broadcastable to [..., t, s] -> [..., t,
    s]: the product with the row that belongs to the pair. The factor d smaller way to have q_i a_ij without the
    vectors a_ij."""
    return products.gather(-1, index.expand(*products.shape[:-1], -1))


def slot_distances(pairs: Pairs, context: Call) -> Tensor:
    """Distance key - query in slots, [B or 1, h or 1, n, t, s]"""
    return context.key_index[pairs.key_at].unsqueeze(-2) - context.query_index[pairs.query_at].unsqueeze(-1)


def pick_rows(vectors: Tensor, table: Tensor, row_at: Tensor) -> Tensor:
    """vectors [B, h, n, t, d], table [h or 1, rows, d], row_at [B or 1, h or 1, n, t, s] -> [B, h, n, t, s]: the
    product of each vector with the row that belongs to the pair."""
    if torch.compiler.is_compiling():  # a graph of any length has no branch
        return pick(torch.matmul(vectors, table.to(vectors.dtype)[:, None].mT), row_at)
    count, some = vectors.shape[-2], max(row_at.shape[-1], LEAST_VECTORS)
    if count > some:  # neighbors need about the same rows, and few of them
        parts = zip(vectors.split(some, dim=-2), row_at.split(some, dim=-2))
        return torch.cat([pick_rows(part, table, at) for part, at in parts], dim=-2)
    low, high = int(row_at.min()), int(row_at.max()) + 1  # near tokens need few rows
    table, row_at = table[:, low:high].to(vectors.dtype), row_at - low
    if high - low <= row_at.shape[-1] * vectors.shape[-1]:
        return pick(torch.matmul(vectors, table[:, None].mT), row_at)
    # Buckets hold tokens from anywhere: products with all rows would be as many as all pairs.
    if table.shape[0] > 1:
        heads = torch.arange(table.shape[0], device=table.device)[:, None, None, None]
        rows = table[heads, row_at.expand(-1, table.shape[0], -1, -1, -1)]
    else:
        rows = table[0, row_at]
    return torch.matmul(rows, vectors.unsqueeze(-1)).squeeze(-1)


def pick_numbers(line: Tensor, distance: Tensor, context: Call) -> Tensor:
    """line [h, T + S - 1], a number for each of [`distances_of_block`] of all queries, distance [B or 1, h or 1, n, t,
    s]
    -> [B or 1, h, n, t, s]"""
    heads, count = line.shape
    index = distance - (context.key_index[:1] - context.query_index[-1:])
    first = torch.arange(heads, device=line.device)[:, None, None, None] * count
    index = index + first
    return line.flatten().index_select(0, index.flatten()).view(index.shape)


def pair_distances(context: Call, rows: slice, keys: slice) -> Tensor:
    """Distance key - query in slots, [t, s] integer."""
    return context.key_index[None, keys] - context.query_index[rows, None]


def far_rows(row_of: Callable[[Tensor], Tensor], reach: int, device: torch.device) -> Tensor:
    """The rows of keys that lie `reach` before and after, [2]."""
    return row_of(constant((-reach, reach), device))


def spread_queries(
    products: Tensor,
    row_of: Callable[[Tensor], Tensor],
    reach: int,
    rows: slice,
    keys: int,
    context: Call,
) -> Tensor:
    """products [B, h, t, n] of the queries `rows` with n rows of a table -> [B, h, t, keys], for each pair the product
    with row `row_of(key - query)`."""
    near = Near.of(context, rows, keys, reach)
    found = pick(products, row_of(pair_distances(context, rows, slice(*near))))
    if near == (0, keys):
        return found
    before, after = products.index_select(-1, far_rows(row_of, reach, products.device)).split(1, dim=-1)
    size = (-1, -1, -1)
    return torch.cat((before.expand(*size, near.first), found, after.expand(*size, keys - near.stop)), dim=-1)


def sum_by_distance(
    weights: Tensor, row_of: Callable[[Tensor], Tensor], count: int, reach: int, rows: slice, context: Call
) -> Tensor:
    """weights [B, h, t, s] -> [B, h, t, count]: the sums over the keys of each row `row_of(key - query)`."""
    keys = weights.shape[-1]
    near = Near.of(context, rows, keys, reach)
    index = row_of(pair_distances(context, rows, slice(*near)))
    sums = weights.new_zeros(*weights.shape[:-1], count)
    # Split once: the gradients of slices would each be as large as the whole.
    before, middle, after = weights.split([near.first, near.stop - near.first, keys - near.stop], dim=-1)
    sums = sums.scatter_add(-1, index.expand(*weights.shape[:2], -1, -1), middle)
    if near == (0, keys):
        return sums
    outer = (before.sum(-1), after.sum(-1))
    return sums.index_add(-1, far_rows(row_of, reach, weights.device), torch.stack(outer, dim=-1))


def distances_of_block(context: Call, rows: slice, keys: int) -> Tensor:
    """Distances key - query from the block's last query and the first key on, [t + keys - 1]: what [`shift_rows`]
    turns into [t, keys]. Slots follow each other."""
    queries = context.query_index[rows]
    steps = torch.arange(queries.shape[0] + keys - 1, device=queries.device)
    return steps + (context.key_index[:1] - queries[-1:])


def products_by_distance(query: Tensor, table: Tensor, keys: int) -> Tensor:
    """query [B, h, t, d], table [h or 1, t + keys - 1, d] with a row for each of [`distances_of_block`] -> [B, h, t,
    keys], each query with the row of the pair's distance."""
    return shift_rows(torch.matmul(query, table.transpose(-1, -2)), keys)


def along_diagonals(line: Tensor, length: int, keys: int) -> Tensor:
    """line [h, t + keys - 1], a number for each of [`distances_of_block`] -> [1, h, t, keys]"""
    return shift_rows(line[None, :, None].expand(1, -1, length, -1), keys)
