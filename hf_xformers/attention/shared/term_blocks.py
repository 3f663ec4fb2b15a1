# SPDX-License-Identifier: Apache-2.0
"""Attention whose scores have terms of their own: the loop over heads and queries on every device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops.common.products import needs_room, widened
from ...ops.score_terms.attention import applies, blocks_of_tiles, diagonal_attention, plus_products, term_attention
from ...ops.score_terms.terms import Blocks, QueryBlock
from ...position.score_terms import SelfAttentionTerms
from .query_blocks import heads_at_once, over_query_blocks, rows_at_once, shared_rows, visible_softmax


def attend_with_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: SelfAttentionTerms,
    dropout: float = 0.0,
    blocks: Blocks | None = None,
) -> Tensor:
    """softmax_j(q_i k_j + term_ij) v_j [+ term of the values], for a few heads and a block of queries at a time.

    query [B, H, T, d] (scaled), key and value [B, H, S, d] -> [B, T, H, d]. Memory: the scores of a few blocks, O(S),
    also in training, where they are made again in the backward pass. What comes in half precision is computed in
    float32.
    """
    if needs_room(query):
        with torch.autocast(query.device.type, enabled=False):
            (q, k, v), wide = widened(query, key, value), terms.with_tables(widened(*terms.tables))
            return attend_with_terms(q, k, v, wide, dropout, blocks).to(value.dtype)
    mask, tables = terms.context.explicit_mask, terms.tables
    if blocks is None and mask is not None and mask.shape[1] > 1:  # it is cut by rows and keys alone
        blocks = Blocks(query.shape[1], rows_at_once(query.shape[0] * query.shape[1] * key.shape[2]))
    if applies(query, dropout) and not terms.context.static and not terms.needs_weights:
        functions = terms.with_tables(())  # engines keep it for the backward pass
        if not terms.separable:
            blocks = blocks or blocks_of(query, key.shape[2])
            return term_attention(query, key, value, tables, functions, blocks).transpose(1, 2)
        further = (*terms.by_query(query, tables), *terms.by_key(key, tables))
        pair = (further[0], further[1]) if further else None
        if blocks is None and pair is None and terms.hidden(slice(0, 1), slice(0, 1)) is None:
            blocks = blocks_of_tiles(*query.shape[:3])
        blocks = blocks or blocks_of(query, key.shape[2])
        return diagonal_attention(query, key, value, pair, terms.line(tables), functions, blocks).transpose(1, 2)
    blocks = blocks or blocks_of(query, key.shape[2])
    outputs = []
    for first in range(0, query.shape[1], blocks.heads):
        group = slice(first, first + blocks.heads)
        q, k, v = (x[:, group] for x in (query, key, value))
        outputs.append(_in_blocks(q, k, v, terms.of_heads(group), dropout, blocks.rows))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def blocks_of(query: Tensor, num_keys: int) -> Blocks:
    """How many heads and queries of [B, H, T, d] to take together: few heads with many rows each, since every block of
    rows reads all keys, and adds to all their gradients."""
    batch, heads = query.shape[:2]
    several = heads if torch.compiler.is_compiling() else heads_at_once(batch, heads, num_keys)
    return Blocks(several, rows_at_once(batch * several * num_keys))


def weights_with_terms(
    query: Tensor, key: Tensor, value: Tensor, terms: SelfAttentionTerms, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same with all pairs at once -> output [B, T, H, d], weights [B, H, T, S]."""
    if needs_room(query):
        with torch.autocast(query.device.type, enabled=False):
            (q, k, v), wide = widened(query, key, value), terms.with_tables(widened(*terms.tables))
            found = weights_with_terms(q, k, v, wide, dropout)
        return found[0].to(value.dtype), found[1].to(value.dtype)
    return _attend(terms.whole(query, key, terms.tables), key, value, terms, dropout)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, terms: SelfAttentionTerms, dropout: float, at_once: int
) -> Tensor:
    length, tables = query.shape[2], terms.tables
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
        return _attend(pairs, near_key, near_value, terms, dropout)[0]

    return over_query_blocks(block, length, at_once, (query, 2), *((x, 2) for x in of_queries))


def _attend(
    block: QueryBlock, key: Tensor, value: Tensor, terms: SelfAttentionTerms, dropout: float
) -> tuple[Tensor, Tensor]:
    """The equation for a block; key and value: its keys alone -> output [B, t, H, d], weights [B, H, t, s]."""
    rows = block.rows
    scores = plus_products(terms.scores(block, terms.tables), block.query, key)
    mask = terms.visible(rows, block.keys)
    weights = visible_softmax(scores, mask, terms.rows_can_be_empty, overwrite=True).to(block.query.dtype)
    terms.weighed(weights, rows)
    dropped = F.dropout(weights, dropout) if dropout else weights
    output = torch.matmul(dropped, value)
    if terms.has_values:
        output = output + terms.values(dropped, terms.tables, rows)
    return output.transpose(1, 2), weights
