# SPDX-License-Identifier: Apache-2.0
"""Softmax attention over a window that moves with the query, with products and a bias by distance.

    score_ij = q_i k_j + q_i p_(i-j) + b_h(i-j),   i - j in a fixed interval; out_i = sum_j softmax_j(score_ij) v_j.

Tile by tile of queries and heads, small enough to stay in a processor's cache. In a tile of t rows and t + n - 1 keys,
the n distances of all rows are a view with the stride of a row plus one: what belongs to distances is added there, and
the softmax sees nothing else. Nothing of a tile is kept; the backward pass computes its weights again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.segments import accumulation_dtype
from .terms import Visible

_ROWS = 128  # queries in a tile
_SCORES = 1 << 18  # scores in a tile, over heads: 1 MiB in float32


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    table: Tensor | None,
    before: int,
    visible: Visible | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Queries are the last T of S places; query i reads the keys `i - before ... i - before + n - 1` that there are.

    Args:
        query: `[B, H, T, d]`, scaled. key, value: `[B, H, S, d]`, S >= T.
        bias: `[H, n]`, its column c for the distance `i - j = before - c`; -inf: not read.
        table: vectors p by distance, `[n, d]`, shared by heads.
        before: distance of the farthest key that comes before a query.
        visible: `visible(queries, keys)` gives a boolean mask, `[B or 1, 1 or H, t or 1, s]`, for slices of both.
        dropout: part of the weights that is dropped.

    Returns:
        `[B, H, T, d]`; zeros for a query that reads nothing. First derivatives only.

    Raises:
        ValueError: shapes that do not fit.
    """
    batch, heads, length, width = query.shape
    if key.shape != value.shape or key.shape != (batch, heads, key.shape[2], width) or key.shape[2] < length:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must be [B, H, T, d]"
            " and twice [B, H, S, d], with at least as many keys as queries."
        )
    if bias.dim() != 2 or bias.shape[0] != heads or (table is not None and table.shape != (bias.shape[1], width)):
        raise ValueError(
            f"bias {tuple(bias.shape)} and table {None if table is None else tuple(table.shape)} must be [{heads}, n]"
            f" and [n, {width}]."
        )
    # A seed instead of the generator's state: tiles draw the same numbers again in the backward pass.
    seed = int(torch.randint(1 << 62, ())) if dropout else None
    output = _WindowAttention.apply(query, key, value, bias, table, before, visible, dropout, seed)
    return output.transpose(1, 2)  # made as projections read it: heads of a token side by side


class _Tile(NamedTuple):
    row: int  # of the batch
    heads: slice
    queries: slice
    keys: slice  # those that exist
    columns: slice  # where they stand among the t + n - 1 of the tile


class _Tiles:
    """The tiles of a call, their weights, and the memory in which these are made, which all tiles share."""

    def __init__(self, q, k, bias, table, before, visible, dropout, seed) -> None:
        self.q, self.k, self.before, self.visible, self.dropout = q, k, before, visible, dropout
        self.random = torch.Generator(q.device).manual_seed(seed) if dropout else None
        self.dtype = accumulation_dtype(q.dtype)
        self.lowest = torch.finfo(self.dtype).min / 4  # far from the limit: scores are added to it
        self.bias = bias.to(self.dtype).clamp(min=self.lowest)[:, None]
        self.table = None if table is None else table.to(self.dtype)
        self.distances = bias.shape[1]
        self.can_be_empty = visible is not None or bool((bias == -torch.inf).all(-1).any())
        self.buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __iter__(self) -> Iterator[_Tile]:
        (batch, heads, length, _), keys = self.q.shape, self.k.shape[2]
        at_once = max(1, min(heads, _SCORES // (min(_ROWS, length) * (_ROWS + self.distances))))
        for row in range(batch):
            for head in range(0, heads, at_once):
                for begin in range(0, length, _ROWS):
                    end = min(begin + _ROWS, length)
                    first = keys - length + begin - self.before
                    low, high = max(first, 0), min(first + end - begin + self.distances - 1, keys)
                    low = min(low, high)  # no key is near enough
                    yield _Tile(
                        row,
                        slice(head, min(head + at_once, heads)),
                        slice(begin, end),
                        slice(low, high),
                        slice(low - first, high - first),
                    )

    def part(self, x: Tensor, tile: _Tile, places: slice) -> Tensor:
        """[heads, places, d]"""
        return x[tile.row, tile.heads, places].to(self.dtype)

    def memory(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Two matrices [heads, t, t + n - 1]; in the second, all but the distances is zero and must stay so."""
        heads, rows = tile.heads.stop - tile.heads.start, tile.queries.stop - tile.queries.start
        if (heads, rows) not in self.buffers:
            made = self.q.new_zeros(2, heads, rows, rows + self.distances - 1, dtype=self.dtype)
            self.buffers[heads, rows] = (made[0], made[1])
        return self.buffers[heads, rows]

    def along(self, x: Tensor) -> Tensor:
        """The distances [heads, t, n] of a matrix of [`memory`], as a view."""
        rows, width = x.shape[1:]
        return x.as_strided((x.shape[0], rows, self.distances), (rows * width, width + 1, 1), x.storage_offset())

    def weights(self, tile: _Tile, q: Tensor, k: Tensor) -> Tensor:
        """[heads, t, n] by distance."""
        scores = self.memory(tile)[0]
        whole = k.shape[1] == scores.shape[2]
        if not whole:
            scores.fill_(self.lowest)
        inner = scores[:, :, tile.columns]
        inner.baddbmm_(q, k.mT, beta=0.0)
        if self.visible is not None:
            mask = self.visible(tile.queries, tile.keys)
            mask = mask[tile.row if mask.shape[0] > 1 else 0]
            inner.masked_fill_(~(mask[tile.heads] if mask.shape[0] > 1 else mask), self.lowest)
        by_distance = self.along(scores)
        if self.table is not None:
            by_distance.baddbmm_(q, self.table.mT.expand(q.shape[0], -1, -1))
        total = by_distance + self.bias[tile.heads]
        weights = torch.softmax(total, dim=-1)
        if not whole or self.can_be_empty:
            weights.masked_fill_(total.amax(-1, keepdim=True) < self.lowest / 2, 0.0)
        return weights

    def kept(self, weights: Tensor) -> Tensor | None:
        """What weights are multiplied by: 0 for those that are dropped. Tiles draw in their order."""
        if self.random is None:
            return None
        share = 1.0 - self.dropout
        return torch.empty_like(weights).bernoulli_(share, generator=self.random).div_(share)

    def spread(self, by_distance: Tensor, tile: _Tile) -> Tensor:
        """[heads, t, n] by distance -> [heads, t, keys of the tile]"""
        matrix = self.memory(tile)[1]
        self.along(matrix).copy_(by_distance)
        return matrix[:, :, tile.columns]


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, table, *options):
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        tiles = _Tiles(q, k, bias, table, *options)
        with torch.autocast(q.device.type, enabled=False):
            for tile in tiles:
                weights = tiles.weights(tile, tiles.part(q, tile, tile.queries), tiles.part(k, tile, tile.keys))
                kept = tiles.kept(weights)
                weights = weights if kept is None else weights.mul_(kept)
                found = torch.bmm(tiles.spread(weights, tile), tiles.part(v, tile, tile.keys))
                out[tile.row, tile.queries, tile.heads] = found.transpose(0, 1)
        ctx.save_for_backward(q, k, v, bias, table, out)
        ctx.options = options
        return out

    @staticmethod
    @first_derivative_only("Attention over a window", LITERAL)
    def backward(ctx, grad_out):
        q, k, v, bias, table, out = ctx.saved_tensors
        tiles = _Tiles(q, k, bias, table, *ctx.options)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=tiles.dtype) for x in (k, v))
        grad_bias = torch.zeros_like(bias, dtype=tiles.dtype)
        grad_table = None if table is None else torch.zeros_like(table, dtype=tiles.dtype)
        out, grad_out = out.transpose(1, 2), grad_out.transpose(1, 2)
        with torch.autocast(q.device.type, enabled=False):
            for tile in tiles:
                qq, grad, own = (tiles.part(x, tile, tile.queries) for x in (q, grad_out, out))
                kk, vv = (tiles.part(x, tile, tile.keys) for x in (k, v))
                weights = tiles.weights(tile, qq, kk)
                # softmax: to_score = weight * (to_weight - sum(weight to_weight)), and that sum is grad * out.
                kept = tiles.kept(weights)
                spread = tiles.spread(weights if kept is None else weights * kept, tile)
                grad_v[tile.row, tile.heads, tile.keys].baddbmm_(spread.mT, grad)
                to_weights = tiles.memory(tile)[0]
                to_weights[:, :, tile.columns].baddbmm_(grad, vv.mT, beta=0.0)
                to_scores = tiles.along(to_weights)
                to_scores = to_scores if kept is None else to_scores.mul_(kept)
                to_scores = torch.sub(to_scores, (grad * own).sum(-1, keepdim=True)).mul_(weights)
                grad_bias[tile.heads] += to_scores.sum(1)
                spread = tiles.spread(to_scores, tile)
                grad_k[tile.row, tile.heads, tile.keys].baddbmm_(spread.mT, qq)
                to_q = torch.bmm(spread, kk)
                if grad_table is not None:
                    to_q.baddbmm_(to_scores, tiles.table.expand(to_q.shape[0], -1, -1))
                    grad_table.addmm_(to_scores.flatten(0, 1).mT, qq.reshape(-1, qq.shape[2]))
                grad_q[tile.row, tile.heads, tile.queries] = to_q
        grad_table = None if table is None else grad_table.to(table.dtype)
        return (
            grad_q,
            grad_k.to(k.dtype),
            grad_v.to(v.dtype),
            grad_bias.to(bias.dtype),
            grad_table,
            *[None] * len(ctx.options),
        )
