# SPDX-License-Identifier: Apache-2.0
"""Score terms of self-attention: the call's context says who sees whom, and what follows from distances alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.call import Call
from ..core.visibility import last_key, rows_can_be_empty, visible_block
from ..ops.score_terms.blocks import plus_products
from ..ops.score_terms.terms import Pairs, QueryBlock, ScoreTerms
from .distances import along_diagonals, pick_numbers, slot_distances


class SelfAttentionTerms(ScoreTerms):
    """[`ScoreTerms`] of one call of self-attention: base of what positions and biases add. Queries are the last of all
    slots.

    cross: keys are those of a memory instead (`num_keys` of them), all of which every query sees, but for padding.
    """

    cross: bool = False

    def __init__(self, scale: float, tables: tuple[Tensor, ...], context: Call, num_keys: int | None = None) -> None:
        keys = context.key_index.shape[0] if num_keys is None else num_keys
        super().__init__(scale, tables, context.query_index.shape[0], keys)
        self.context = context

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        """Here for separable terms."""
        query, keys, line = block.query, block.keys, self.line(tables)
        length, bias = query.shape[2], None
        if line is not None:
            first = self.num_queries - block.rows.stop
            bias = along_diagonals(line[:, first : first + length + keys - 1].to(query.dtype), length, keys)
        if not block.by_query:
            return query.new_zeros(1, 1, length, keys) if bias is None else bias
        return plus_products(bias, block.by_query[0], block.by_key[0].take(0, keys))

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """Here for separable terms."""
        line, scores = self.line(tables), None
        if pairs.by_query:
            scores = torch.matmul(pairs.by_query[0], pairs.by_key[0].mT)
        if line is not None:
            numbers = pick_numbers(line.to(pairs.query.dtype), slot_distances(pairs, self.context), self.context)
            scores = numbers if scores is None else scores + numbers
        return pairs.query.new_zeros(1, 1, 1, 1, 1) if scores is None else scores

    @property
    def ordered(self) -> bool:
        return not self.cross and self.context.causal and self.context.explicit_mask is None

    @property
    def rows_can_be_empty(self) -> bool:
        return rows_can_be_empty(self.context, self.cross)

    def last_key(self, stop: int) -> int:
        return last_key(self.context, self.cross, self.num_keys, stop)

    def visible(self, rows: slice, keys: int) -> Tensor | None:
        return visible_block(self.context, self.cross, rows, slice(0, keys))

    def hidden(self, rows: slice, keys: slice) -> Tensor | None:
        mask = visible_block(self.context, self.cross, rows, keys, order=False)
        return None if mask is None else ~mask


class BiasByDistance(SelfAttentionTerms):
    """A bias [H, T + S - 1] by distance, from the last query to the first key and on: the only table."""

    separable = True

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        return tables[0]


class BiasOfPairs(SelfAttentionTerms):
    """A bias of which nothing is known but how to evaluate it on blocks of pairs: `evaluate(query_index [..., Tq],
    key_index [..., Tk])` gives [..., H, Tq, Tk]. Its only table has the numbers of the heads, [H, 1]."""

    def __init__(
        self,
        scale: float,
        tables: tuple[Tensor, ...],
        context: Call,
        evaluate: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(scale, tables, context)
        self.evaluate = evaluate

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        matrix = self.evaluate(self.context.query_index[block.rows], self.context.key_index[: block.keys])
        return matrix[..., tables[0][:, 0].long(), :, :].expand(1, -1, -1, -1)

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        heads = tables[0][:, 0].long()
        queries, keys = self.context.query_index[pairs.query_at], self.context.key_index[pairs.key_at]
        if queries.shape[1] == keys.shape[1] == 1:
            return self.evaluate(queries[:, 0], keys[:, 0]).transpose(1, 2)[:, heads]
        found = []  # heads that look at different pairs are evaluated one by one
        for number, head in enumerate(heads.tolist()):
            own = (x[:, number if x.shape[1] > 1 else 0] for x in (queries, keys))
            found.append(self.evaluate(*own)[:, :, head])
        return torch.stack(found, dim=1)
