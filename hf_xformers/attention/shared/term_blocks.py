"""Attention whose scores have terms of their own: who sees whom, and the loop over heads and queries on every
device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.context import LayerContext
from ...ops.common.products import needs_room, widened
from ...ops.common.shifted_rows import SharedRows
from ...ops.score_terms.attention import applies, blocks_of_tiles, diagonal_attention, plus_products, term_attention
from ...ops.score_terms.terms import Blocks, Pairs, QueryBlock, Terms
from ...position.distances import along_diagonals, pick_numbers, slot_distances
from .query_blocks import heads_at_once, last_key, over_query_blocks, rows_at_once, shared_rows, visible_softmax
from .visibility import rows_can_be_empty, visible_block


class VisibleTerms:
    """Base of [`Terms`] in self-attention: queries are the last of all slots, and the context says who sees whom.

    separable: the terms are the products of what belongs to queries and what belongs to keys, one tensor each or none,
    and a number for each distance. needs_weights: [`VisibleTerms.weighed`] wants to see the weights of all blocks.
    """

    has_values = False
    separable = False
    needs_weights = False

    def __init__(self, context: LayerContext, num_keys: int) -> None:
        self.context, self.num_keys = context, num_keys

    @property
    def first_query(self) -> int:
        """The slot of the first query among those of the keys."""
        return self.num_keys - self.context.query_index.shape[0]

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()

    def by_distance(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        """As [`Terms.scores`]; here for separable terms."""
        query, keys, line = block.query, block.keys, self.line(tables)
        length, bias = query.shape[2], None
        if line is not None:
            first = self.context.query_index.shape[0] - block.rows.stop
            bias = along_diagonals(line[:, first : first + length + keys - 1].to(query.dtype), length, keys)
        if not block.by_query:
            return query.new_zeros(1, 1, length, keys) if bias is None else bias
        return plus_products(bias, block.by_query[0], block.by_key[0].take(0, keys))

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """As [`PairTerms.pairs`]; here for separable terms."""
        line, scores = self.line(tables), None
        if pairs.by_query:
            scores = torch.matmul(pairs.by_query[0], pairs.by_key[0].mT)
        if line is not None:
            numbers = pick_numbers(line.to(pairs.query.dtype), slot_distances(pairs, self.context), self.context)
            scores = numbers if scores is None else scores + numbers
        return pairs.query.new_zeros(1, 1, 1, 1, 1) if scores is None else scores

    def pair_values(self, weights: Tensor, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        """As [`PairTerms.pair_values`]."""
        raise NotImplementedError

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        """A number for each distance from that of the last query and the first key on, [h, T + S - 1], if there is
        one."""
        return None

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice) -> Tensor:
        raise NotImplementedError

    def weighed(self, weights: Tensor, rows: slice) -> None:
        """Told of the weights [B, h, t, s] of the queries `rows`, before dropout."""

    @property
    def rows_can_be_empty(self) -> bool:
        """Whether some query may see nothing at all."""
        return rows_can_be_empty(self.context)

    def last_key(self, stop: int) -> int:
        return last_key(self.context, False, self.num_keys, stop)

    def visible(self, rows: slice, keys: int) -> Tensor | None:
        """Which of the first `keys` keys the queries `rows` see, [B or 1, 1 or H, t or 1, s]; None: all."""
        return visible_block(self.context, False, rows, slice(0, keys))

    @property
    def ordered(self) -> bool:
        return self.context.causal and self.context.explicit_mask is None

    def hidden(self, rows: slice, keys: slice) -> Tensor | None:
        mask = visible_block(self.context, False, rows, keys, order=False)
        return None if mask is None else ~mask

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        keys = scores.shape[-1]
        with torch.no_grad():
            first = self.first_query + rows.start + 1  # earlier keys are seen by all of these queries
            if self.ordered and first < keys:
                slots = torch.arange(first - 1, keys, device=scores.device)
                later = slots[1:] > slots[: scores.shape[-2], None]
                scores[..., first:].masked_fill_(later, -torch.inf)
            hidden = self.hidden(rows, slice(0, keys))
            if hidden is None:
                return scores
            if hidden.shape[0] > scores.shape[0]:
                return scores.masked_fill(hidden, -torch.inf)
            return scores.masked_fill_(hidden, -torch.inf)


def attend_with_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: VisibleTerms,
    dropout: float = 0.0,
    blocks: Blocks | None = None,
) -> Tensor:
    """softmax_j(q_i k_j + term_ij) v_j [+ term of the values], for a few heads and a block of queries at a time.

    query [B, H, T, d] (scaled), key and value [B, H, S, d], tables [H or 1, ...] -> [B, T, H, d]. Memory: the scores
    of a few blocks, O(S), also in training, where they are made again in the backward pass. What comes in half
    precision is computed in float32.
    """
    if needs_room(query):
        with torch.autocast(query.device.type, enabled=False):
            inputs, wide = widened(query, key, value), widened(*tables)
            return attend_with_terms(*inputs, wide, terms, dropout, blocks).to(value.dtype)
    mask = terms.context.explicit_mask
    if blocks is None and mask is not None and mask.shape[1] > 1:  # it is cut by rows and keys alone
        blocks = Blocks(query.shape[1], rows_at_once(query.shape[0] * query.shape[1] * key.shape[2]))
    tiled = applies(query, dropout) and not terms.context.static and not terms.needs_weights
    if tiled and terms.separable:
        further = (*terms.by_query(query, tables), *terms.by_key(key, tables))
        pair = (further[0], further[1]) if further else None
        if blocks is None and pair is None and terms.hidden(slice(0, 1), slice(0, 1)) is None:
            blocks = blocks_of_tiles(*query.shape[:3])
        blocks = blocks or blocks_of(query, key.shape[2])
        return diagonal_attention(query, key, value, pair, terms.line(tables), terms, blocks).transpose(1, 2)
    blocks = blocks or blocks_of(query, key.shape[2])
    if tiled:
        return term_attention(query, key, value, tables, terms, blocks).transpose(1, 2)
    outputs = []
    for first in range(0, query.shape[1], blocks.heads):
        group = slice(first, first + blocks.heads)
        some = tuple(x if x.shape[0] == 1 else x[group] for x in tables)
        outputs.append(_in_blocks(query[:, group], key[:, group], value[:, group], some, terms, dropout, blocks.rows))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def blocks_of(query: Tensor, num_keys: int) -> Blocks:
    """How many heads and queries of [B, H, T, d] to take together: few heads with many rows each, since every block of
    rows reads all keys, and adds to all their gradients."""
    batch, heads = query.shape[:2]
    several = heads if torch.compiler.is_compiling() else heads_at_once(batch, heads, num_keys)
    return Blocks(several, rows_at_once(batch * several * num_keys))


def weights_with_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: VisibleTerms,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same with all pairs at once -> output [B, T, H, d], weights [B, H, T, S]."""
    if needs_room(query):
        with torch.autocast(query.device.type, enabled=False):
            found = weights_with_terms(*widened(query, key, value), widened(*tables), terms, dropout)
        return found[0].to(value.dtype), found[1].to(value.dtype)
    of_queries = terms.by_query(query, tables)
    of_keys = tuple(SharedRows(x, 1) for x in terms.by_key(key, tables))
    of_distances = tuple(SharedRows(x, 1) for x in terms.by_distance(tables))
    block = QueryBlock(query, of_queries, of_keys, slice(0, query.shape[2]), key.shape[2], of_distances)
    return _attend(block, key, value, tables, terms, dropout)


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: VisibleTerms,
    dropout: float,
    at_once: int,
) -> Tensor:
    length = query.shape[2]
    of_queries = terms.by_query(query, tables)
    shared = (
        tuple(shared_rows(x, length, at_once) for x in group)
        for group in ((key, value), terms.by_key(key, tables), terms.by_distance(tables))
    )
    (key_rows, value_rows), of_keys, of_distances = shared

    def block(begin: int, end: int, part: Tensor, *own: Tensor) -> Tensor:
        seen = terms.last_key(end)
        near_key, near_value = key_rows.take(0, seen), value_rows.take(0, seen)
        pairs = QueryBlock(part, own, of_keys, slice(begin, end), seen, of_distances)
        return _attend(pairs, near_key, near_value, tables, terms, dropout)[0]

    return over_query_blocks(block, length, at_once, (query, 2), *((x, 2) for x in of_queries))


def _attend(
    block: QueryBlock,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: VisibleTerms,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The equation for a block; key and value: its keys alone -> output [B, t, H, d], weights [B, H, t, s]."""
    rows = block.rows
    scores = plus_products(terms.scores(block, tables), block.query, key)
    mask = terms.visible(rows, block.keys)
    weights = visible_softmax(scores, mask, terms.rows_can_be_empty, overwrite=True).to(block.query.dtype)
    terms.weighed(weights, rows)
    dropped = F.dropout(weights, dropout) if dropout else weights
    output = torch.matmul(dropped, value)
    if terms.has_values:
        output = output + terms.values(dropped, tables, rows)
    return output.transpose(1, 2), weights


__all__ = ["Terms", "VisibleTerms", "attend_with_terms", "weights_with_terms"]
