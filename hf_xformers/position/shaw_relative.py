# SPDX-License-Identifier: Apache-2.0
"""Relative position representations of Shaw et al."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..core.reading_weights import weight_of
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTerms
from .distances import pick_rows, slot_distances, spread_queries, sum_by_distance
from .score_terms import SelfAttentionTerms


class ShawTerms(PositionTerms):
    """score_ij += q_i a^K_c(j-i), o_i += sum_j w_ij a^V_c(j-i), c(x) = clip(x, -k, k) (eqs. 3 and 4); with `keys`
    score_ij += k_j a^K_c(j-i), too, at the scale of q_i k_j (Huang et al. 2020, arXiv 2009.13658, method 4).

    Tables [2k + 1, d], or one for each head. Neither the vectors a_ij nor anything else with T S d numbers is made:
    queries are multiplied with the table, and weights are summed by distance before they are.
    """

    def __init__(self, config, spec: ShawRelativeSpec):
        super().__init__()
        self.reach = spec.max_distance
        heads = (1,) if spec.share_heads else (config.num_attention_heads,)
        size = (*heads, 2 * spec.max_distance + 1, config.head_width)
        self.key_table = nn.Parameter(torch.empty(size))
        self.value_table = nn.Parameter(torch.empty(size)) if spec.values else None
        self.reads_keys = spec.keys

    def initialize(self, config, init) -> None:
        for table in (self.key_table, self.value_table):
            if table is not None:  # as the projections of keys and values, which they stand next to
                init.xavier_uniform_(table)

    def score_terms(self, attention: Any, scale: float, context: Call) -> ShawScores:
        keys = weight_of(self, "key_table")
        tables = (keys,) if self.value_table is None else (keys, weight_of(self, "value_table"))
        if self.reads_keys:
            tables = (*tables, keys * scale)
        return ShawScores(scale, tables, context, self.reach, self.value_table is not None, self.reads_keys)


class ShawScores(SelfAttentionTerms):
    """The terms of one call, of a^K and, where there are any, a^V; reads_keys: keys are multiplied with the last
    table."""

    def __init__(
        self,
        scale: float,
        tables: tuple[Tensor, ...],
        context: Call,
        reach: int,
        has_values: bool,
        reads_keys: bool,
    ) -> None:
        super().__init__(scale, tables, context)
        self.reach, self.has_values, self.reads_keys = reach, has_values, reads_keys

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (key,) if self.reads_keys else ()

    def _row(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.reach, self.reach) + self.reach

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        products = torch.matmul(block.query, tables[0].transpose(-1, -2).to(block.query.dtype))
        found = spread_queries(products, self._row, self.reach, block.rows, block.keys, self.context)
        if not self.reads_keys:
            return found
        key = block.by_key[0].take(0, block.keys)
        pairs = Pairs.of_block(block.query, key, block.rows, block.keys)
        return found + self._of_keys(pairs, tables).squeeze(2)

    def _of_keys(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """scale * k_j a^K_c(j-i), [B, h, n, t, s]"""
        return pick_rows(pairs.key, tables[-1], self._row(slot_distances(pairs, self.context)).mT).mT

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        found = pick_rows(pairs.query, tables[0], self._row(slot_distances(pairs, self.context)))
        return found + self._of_keys(pairs, tables) if self.reads_keys else found

    def pair_values(self, weights: Tensor, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        index = self._row(slot_distances(pairs, self.context)).expand_as(weights)
        sums = weights.new_zeros(*weights.shape[:-1], 2 * self.reach + 1).scatter_add(-1, index, weights)
        return torch.matmul(sums, tables[1][:, None].to(weights.dtype))

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice) -> Tensor:
        sums = sum_by_distance(weights, self._row, 2 * self.reach + 1, self.reach, rows, self.context)
        return torch.matmul(sums, tables[1].to(weights.dtype))


@register("position", "shaw_relative", aliases=("shaw",))
class ShawRelativeSpec(PositionSpec):
    """Shaw, Uszkoreit and Vaswani 2018 (arXiv 1803.02155), section 3.2. Any length: distances beyond `max_distance`
    count as that.

    Args:
        max_distance: k, tokens to either side that are told apart.
        values: also add a vector to values.
        share_heads: one table for all heads of a layer.
        keys: keys, too, are multiplied with the vectors that queries are (BERT's `relative_key_query`).
    """

    summary = "a learned vector per clipped distance on keys and values"
    acts = frozenset({"score_terms"})

    max_distance: int = bounded(16, least=0)
    values: bool = True
    share_heads: bool = True
    keys: bool = False

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> ShawTerms:
        return ShawTerms(config, self)
