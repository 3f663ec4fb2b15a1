# SPDX-License-Identifier: Apache-2.0
"""Softmax attention whose scores have terms of their own, over tiles of gathered queries and keys.

What [`term_attention`] is to all pairs this is to a sparse set of them: a pattern of positions, or buckets found by
content. A tile is a few queries and the keys that they meet. One query may meet keys in several rounds of tiles, whose
results are one softmax, joined by the logarithms of their sums. Nothing is kept for the backward pass but the inputs:
some heads at a time are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...compat import softmax_backward
from ..common.products import needs_room, widened
from ..common.row_lookup import take_rows
from .terms import Pairs, ScoreTerms, Tiles

# Scores (over batch, heads and all tiles) that are there at once: 8 MiB in float32, and their gradients and labels.
SCORES_AT_ONCE = 1 << 21


def tile_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: ScoreTerms,
    rounds: Sequence[Sequence[Tiles]],
    dropout: float = 0.0,
) -> Tensor:
    """softmax_j(q_i k_j + term_ij) v_j [+ term of the values] over the pairs of all tiles, [B, H, T, d].

    query [B, H, T, d] (scaled), key and value [B, H, S, d], tables [H or 1, ...]. rounds: a query stands in one tile
    of a round at most, and a pair that two rounds hold counts twice. A query that meets no key gets zeros. Time and
    memory grow with the number of pairs in tiles. What comes in half precision is computed in float32.
    """
    if needs_room(query):
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = widened(query, key, value)
            return tile_attention(q, k, v, widened(*tables), terms, rounds, dropout).to(value.dtype)

    def attend(group: slice, query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        by_query, by_key = terms.by_query(query, tables), terms.by_key(key, tables)
        outputs, norms = [], []
        for tiles in rounds:
            own = [each.of_heads(group) for each in tiles]
            found = [
                attend_in_tiles(query, key, value, tables, terms, by_query, by_key, each, dropout) for each in own
            ]
            places = [each.query_at for each in own]
            outputs.append(_back([output for output, _ in found], places, query.shape[2], 0.0))
            norms.append(_back([norm[..., None] for _, norm in found], places, query.shape[2], _lowest(found[0][1])))
        return _joined(outputs, norms).to(query.dtype)

    rounds = [tiles for tiles in rounds if tiles]
    if not rounds:
        return torch.zeros_like(query)
    return over_heads(attend, query, key, value, tables, at_once=tiled_heads_at_once(query.shape[0], rounds))


def tiled_heads_at_once(batch: int, rounds: Sequence[Sequence[Tiles]]) -> int:
    """How many heads to take together."""
    scores = batch * sum(each.allowed[0, 0].numel() for tiles in rounds for each in tiles)
    return max(SCORES_AT_ONCE // max(scores, 1), 1)


def over_heads(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    at_once: int,
) -> Tensor:
    """`attend(heads, query, key, value, tables)` [B, h, T, d] for some heads at a time, computed again in the backward
    pass."""
    heads = query.shape[1]
    if at_once >= heads:
        return attend(slice(0, heads), query, key, value, tables)
    # split, not slices: its gradient is put together once, where every slice would make one as large as the whole.
    parts = [x.split(at_once, dim=1) for x in (query, key, value)]
    shares = [x.split(at_once) if x.shape[0] == heads else None for x in tables]
    pieces = []
    for number, begin in enumerate(range(0, heads, at_once)):
        some = tuple(x if share is None else share[number] for x, share in zip(tables, shares))
        arguments = (slice(begin, begin + at_once), *(part[number] for part in parts), some)
        if torch.is_grad_enabled():
            pieces.append(checkpoint(attend, *arguments, use_reentrant=False))
        else:
            pieces.append(attend(*arguments))
    return torch.cat(pieces, dim=1)


def attend_in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: ScoreTerms,
    by_query: tuple[Tensor, ...],
    by_key: tuple[Tensor, ...],
    tiles: Tiles,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, h, n, t, d] and logarithms of the sums of exponentials [B, h, n, t] of each tile, in float32 at
    least. Where a query meets nothing, zeros and a number so low that it vanishes in a sum with any other."""
    query_at, key_at = tiles.query_at.clamp(min=0), tiles.key_at.clamp(0, max(key.shape[2] - 1, 0))
    of_queries, of_keys = (tuple(take(x, at) for x in xs) for xs, at in ((by_query, query_at), (by_key, key_at)))
    pairs = Pairs(take(query, query_at), take(key, key_at), of_queries, of_keys, query_at, key_at)
    scores = torch.matmul(pairs.query, pairs.key.mT) + terms.pairs(pairs, tables)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if tiles.own_score is not None:
        own = query_at[..., :, None] + tiles.offset == key_at[..., None, :]
        scores = scores.masked_fill(own, tiles.own_score)
    weights, norm = _SoftmaxAndNorm.apply(scores.masked_fill_(~tiles.allowed, _lowest(scores)))
    weights = (F.dropout(weights, dropout) if dropout else weights).to(value.dtype)
    output = torch.matmul(weights, take(value, key_at))
    if terms.has_values:
        output = output + terms.pair_values(weights, pairs, tables)
    return output.to(norm.dtype), norm


class _SoftmaxAndNorm(torch.autograd.Function):
    """Softmax of scores [..., s] and the logarithms of their sums of exponentials [...]; zeros, and no gradient, where
    all scores are the lowest there are. Only the weights are kept."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights, highest = torch.softmax(scores, -1), scores.amax(-1, keepdim=True)
        norm = highest - weights.amax(-1, keepdim=True).log()  # the largest weight is exp(highest - norm)
        weights = weights.masked_fill_(highest <= _lowest(scores), 0.0)
        ctx.save_for_backward(weights)
        return weights, norm.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_norm: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        change = softmax_backward(grad, weights, -1, weights.dtype)
        return torch.addcmul(change, weights, grad_norm[..., None])


def take(x: Tensor, at: Tensor) -> Tensor:
    """x [B or 1, h, T, n], at [B or 1, h or 1, tiles, t] -> [B or 1, h, tiles, t, n]"""
    if at.shape[:2] == (1, 1):
        return x.index_select(2, at.flatten()).unflatten(2, at.shape[2:])
    batch = max(x.shape[0], at.shape[0])
    return take_rows(x.expand(batch, -1, -1, -1), at.expand(batch, x.shape[1], -1, -1))


def _lowest(scores: Tensor) -> float:
    return torch.finfo(scores.dtype).min / 4  # far from the limit: sums of it are taken


def _back(found: list[Tensor], places: list[Tensor], length: int, otherwise: float) -> Tensor:
    """What tiles found [B, h, n, t, d], at the places of their queries: [B, h, length, d]."""
    rows = torch.cat([each.flatten(2, 3) for each in found], dim=2)
    at = torch.cat([each.flatten(2) for each in places], dim=2)
    at = torch.where(at < 0, length, at)[..., None].expand_as(rows)
    return rows.new_full((*rows.shape[:2], length + 1, rows.shape[3]), otherwise).scatter(2, at, rows)[:, :, :length]


def _joined(outputs: list[Tensor], norms: list[Tensor]) -> Tensor:
    if len(outputs) == 1:
        return outputs[0]
    shares = torch.softmax(torch.cat(norms, dim=-1), dim=-1).split(1, dim=-1)
    total = outputs[0] * shares[0]
    for output, share in zip(outputs[1:], shares[1:]):
        total = total + output * share
    return total
