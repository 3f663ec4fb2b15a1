# SPDX-License-Identifier: Apache-2.0
"""Attention with terms of its own as the equations say it, from the matrix of all scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.products import masked_softmax
from .terms import Pairs, ScoreTerms, Tiles, Visible


def term_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor, ...], terms: ScoreTerms
) -> Tensor:
    """[`term_attention`] with all queries in one block."""
    everything = slice(0, query.shape[2])
    block = terms.whole(query, key, tables)
    weights = _softmax(query @ key.mT + terms.hide(terms.scores(block, tables).clone(), everything))
    output = weights @ value
    return output + terms.values(weights, tables, everything) if terms.has_values else output


def diagonal_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    further: tuple[Tensor, Tensor] | None,
    line: Tensor | None,
    pairs: ScoreTerms,
) -> Tensor:
    """[`diagonal_attention`] with the number of each distance laid out for each pair."""
    (length, keys), scores = (query.shape[2], key.shape[2]), query @ key.mT
    after = torch.arange(keys, device=key.device) - torch.arange(length, device=key.device)[:, None]
    if further is not None:
        scores = scores + further[0] @ further[1].mT
    if line is not None:
        scores = scores + line[:, after + length - 1]
    if pairs.ordered:
        scores = scores.masked_fill(after > keys - length, -torch.inf)
    hidden = pairs.hidden(slice(0, length), slice(0, keys))
    return _softmax(scores if hidden is None else scores.masked_fill(hidden, -torch.inf)) @ value


def tile_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: ScoreTerms,
    rounds: Sequence[Sequence[Tiles]],
) -> Tensor:
    """[`tile_attention`] with one row of scores for each query, over the keys of all tiles one after another."""
    by_query, by_key = terms.by_query(query, tables), terms.by_key(key, tables)
    size, length, logits, found = query.shape[:2], query.shape[2], [], []
    for tiles in (tiles for several in rounds for tiles in several):
        query_at, key_at = (x.expand(*size, -1, -1) for x in (tiles.query_at, tiles.key_at))
        asks, places = query_at.clamp(min=0), key_at.clamp(0, key.shape[2] - 1)
        # Which tile and row of it a query stands in, [B, H, n, t, T].
        stands = (F.one_hot(asks, length) * (query_at >= 0)[..., None]).to(query.dtype)
        of_queries, of_keys = (tuple(_pick(x, at) for x in xs) for xs, at in ((by_query, asks), (by_key, places)))
        pairs = Pairs(_pick(query, asks), _pick(key, places), of_queries, of_keys, asks, places)
        scores = pairs.query @ pairs.key.mT + terms.pairs(pairs, tables)
        if tiles.own_score is not None:
            own = asks[..., :, None] + tiles.offset == places[..., None, :]
            scores = scores.masked_fill(own, tiles.own_score)
        seen = torch.einsum("bhnts,bhntl->bhlns", tiles.allowed.expand_as(scores).to(query.dtype), stands) > 0
        rows = torch.einsum("bhnts,bhntl->bhlns", scores, stands)
        logits.append(rows.masked_fill(~seen, -torch.inf).flatten(3))
        found.append((pairs, stands, _pick(value, places)))
    output = torch.zeros_like(query)
    if not logits:
        return output
    shares = _softmax(torch.cat(logits, dim=-1)).split([x.shape[-1] for x in logits], dim=-1)
    for weights, (pairs, stands, values) in zip(shares, found, strict=True):
        output = output + weights @ values.flatten(2, 3)
        if terms.has_values:
            in_tiles = torch.einsum("bhlns,bhntl->bhnts", weights.unflatten(3, values.shape[2:4]), stands)
            more = terms.pair_values(in_tiles, pairs, tables)
            output = output + torch.einsum("bhntd,bhntl->bhld", more, stands)
    return output


def window_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    table: Tensor | None,
    before: int,
    visible: Visible | None = None,
) -> Tensor:
    """The same from the matrix of all scores."""
    length, keys, distances = query.shape[2], key.shape[2], bias.shape[1]
    column = before - (torch.arange(keys - length, keys)[:, None] - torch.arange(keys))
    inside, column = (column >= 0) & (column < distances), column.clamp(0, distances - 1)
    scores = query @ key.mT + bias[:, column]
    if table is not None:
        scores = scores + torch.einsum("bhid,ijd->bhij", query, table[column])
    seen = inside & (bias[:, column] > -torch.inf)
    seen = seen if visible is None else seen & visible(slice(0, length), slice(0, keys))
    return masked_softmax(scores, seen) @ value


def distance_products_reference(
    query: Tensor,
    key: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    near: tuple[int, int],
    keys: int,
) -> Tensor:
    """[`distance_products`] with the vector of each pair looked up."""
    (first, stop), length = near, query.shape[2]
    rows, columns = torch.arange(length, device=query.device)[:, None], torch.arange(keys, device=query.device)
    before, after = (columns < first).expand(length, -1), (columns >= stop).expand(length, -1)
    scores = query.new_zeros(*query.shape[:3], keys)
    if of_queries is not None:
        vectors = _vector_of_pairs(of_queries, columns - first - rows + length - 1, before, after, near)
        scores = scores + (query[..., None, :] * vectors).sum(-1)
    if key is not None and of_keys is not None:
        vectors = _vector_of_pairs(of_keys, rows - columns + stop - 1, after, before, near)
        scores = scores + (key[:, :, None] * vectors).sum(-1)
    return scores


def _vector_of_pairs(vectors: Tensor, at: Tensor, before: Tensor, after: Tensor, near: tuple[int, int]) -> Tensor:
    """[h or 1, n, d] -> [h or 1, t, s, d]: those `at` the pairs; before and after: which pairs have the first, and the
    last, as theirs. Without such a vector theirs is zero."""
    if vectors.shape[1] == at.shape[0] + near[1] - near[0] - 1:
        return vectors[:, at.clamp(0, vectors.shape[1] - 1)] * ~(before | after)[..., None]
    at = (at + int(before.any())).masked_fill(before, 0).masked_fill(after, vectors.shape[1] - 1)
    return vectors[:, at]


def _pick(x: Tensor, at: Tensor) -> Tensor:
    """x [B or 1, H, T, d], at [B, H, n, t] -> [B, H, n, t, d]"""
    rows = x.expand(at.shape[0], -1, -1, -1)[:, :, None].expand(-1, -1, at.shape[2], -1, -1)
    return rows.gather(3, at[..., None].expand(*at.shape, x.shape[3]))


def _softmax(scores: Tensor) -> Tensor:
    """Zeros in rows where all is -inf, and no gradient there."""
    return masked_softmax(scores, ~torch.isneginf(scores))
