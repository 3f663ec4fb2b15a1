# SPDX-License-Identifier: Apache-2.0
"""The terms of Transformer-XL's scores as engines with score terms read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.call import Call
from ...ops.common.shifted_rows import shift_rows
from ...ops.score_terms.attention import distance_products
from ...ops.score_terms.terms import QueryBlock
from ...position.score_terms import SelfAttentionTerms
from .query_grid import Grid, KeyUsage, PairsInSight, ScatteredGrid
from .relative_embeddings import KeyTypes


def count_usage(context: Call, step: int, weights: Tensor, rows: slice, keys: int) -> None:
    """Adds the attention [B, H, t, s] that the real ones of the queries `rows` pay to what each of `keys` keys has
    got."""
    found = context.find(KeyUsage)
    if found is None:
        return
    usage = found.by_step
    paid, real = weights.detach().sum(1), context.query_padding_mask
    if real is not None:
        paid = paid * real[:, rows, None]
    got = F.pad(paid.sum(1), (0, keys - paid.shape[-1]))
    usage[step] = usage[step] + got if step in usage else got


def by_segment(by_kind: Tensor, same: Tensor) -> Tensor:
    """Scores with the vectors of [different, same] segments [..., t, 2] -> [..., t, s]."""
    return torch.where(same, by_kind[..., 1:], by_kind[..., :1])


def by_key_type(number: Tensor, types: Tensor) -> Tensor:
    """A number for each type [H, n, 1] -> for each key, whose types are [B, S]: [B, H, S, 1]."""
    return number[:, types].transpose(0, 1)


class RelativeTerms(SelfAttentionTerms):
    """(q_i + v) W_R R by distance in one call. Tables: W_R R [H, distances, d], the largest first, and v - u [H, 1,
    d]; with segments s - u [H, 1, d] and the two vectors [H, d, 2]; with types of keys a number for each, [H, n, 1],
    at the end."""

    def __init__(
        self,
        layer: Any,
        tables: tuple[Tensor, ...],
        context: Call,
        num_keys: int,
        grid: Grid,
        real: Tensor | None,
        step: int,
    ) -> None:
        super().__init__(layer.scaling, tables, context, num_keys)
        self.layer, self.grid, self.real, self.step = layer, grid, real, step
        self.needs_weights = context.find(KeyUsage) is not None
        self.types = context.prepared(KeyTypes).types if layer.t_proj is not None else None

    @property
    def rows_can_be_empty(self) -> bool:
        return self.real is not None or self.context.find(PairsInSight) is not None

    @property
    def ordered(self) -> bool:
        return self.layer.is_causal

    def last_key(self, stop: int) -> int:
        return self.first_query + stop if self.layer.is_causal else self.num_keys

    def visible(self, rows: slice, keys: int) -> Tensor | None:
        return self.layer.visible(rows, slice(0, keys), self.grid, self.context, self.real)

    def hidden(self, rows: slice, keys: slice) -> Tensor | None:
        mask = self.layer.visible(rows, keys, self.grid, self.context, self.real, order=False)
        return None if mask is None else ~mask

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        position = query + tables[1]
        if self.layer.segment_table is None:
            return (position,)
        return position, torch.matmul(query + tables[2], tables[3])

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return () if self.types is None else (by_key_type(tables[-1], self.types),)

    def by_distance(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (tables[0].unsqueeze(0),)

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        scores = self._of_positions(block)
        if block.by_key:
            scores = scores + block.by_key[0].take(0, block.keys).mT
        if len(block.by_query) == 1:
            return scores
        same = self.layer.same_segment(self.context, block.rows, slice(0, block.keys))
        return scores + self.grid.without_first(by_segment(block.by_query[1], same), block.rows)

    def _of_positions(self, block: QueryBlock) -> Tensor:
        rows, keys = block.rows, block.keys
        if isinstance(self.grid, ScatteredGrid):  # all distances, of which each query takes those of its own place
            last = self.grid.largest(self.num_queries)
            every = block.by_distance[0].take(0, 2 * last + 1).squeeze(0)
            products = torch.matmul(block.by_query[0], every.transpose(-1, -2))
            column = last - self.grid.distances(rows, slice(0, keys), products.device)
            return products.gather(-1, column.expand(*products.shape[:2], -1, -1))
        length, step = rows.stop - rows.start, self.grid.step
        first = step * (self.num_queries - rows.stop)
        near = block.by_distance[0].take(first, first + keys + step * (length - 1)).squeeze(0)
        if step == 1 and not torch.compiler.is_compiling():
            return self._by_distance(block, near)
        scores = shift_rows(torch.matmul(block.by_query[0], near.transpose(-1, -2)), keys, step)
        return self.grid.without_first(scores, rows)

    def _by_distance(self, block: QueryBlock, near: Tensor) -> Tensor:
        """The scores of queries that stand as close as the keys. What stands apart has none."""
        query, apart = block.by_query[0], int(self.grid.apart)
        if apart and block.rows.start == 0:
            query = F.pad(query[:, :, 1:], (0, 0, 1, 0))
        vectors = near[:, apart:] if apart else near
        return distance_products(query, None, vectors, None, (apart, block.keys), block.keys)

    def weighed(self, weights: Tensor, rows: slice) -> None:
        count_usage(self.context, self.step, weights, rows, self.num_keys)
