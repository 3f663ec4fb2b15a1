# SPDX-License-Identifier: Apache-2.0
"""Buckets and clusters whose scores have terms of their own, as tiles for [`tile_attention`]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bucketed.attention import HIDDEN, OWN_KEY, Chunks, Recent, Round, sorted_layout
from ..common.row_lookup import sum_rows
from ..common.tile_engines import Scratch
from .terms import ScoreTerms, Tiles
from .tiles import attend_in_tiles, over_heads, tiled_heads_at_once


@torch.no_grad()
def bucket_tiles(
    labels: Tensor,
    sets: Recent | Chunks,
    *,
    num_labels: int,
    key_padding_mask: Tensor | None = None,
    distinct: bool = True,
    own_key_last: bool = False,
    query_offset: int = 0,
) -> list[list[Tiles]]:
    """The pairs of [`bucketed_attention`] with the same arguments: a round of tiles for each round of labels [B, H, R,
    T].
    query_offset: the place of the first query, where the queries are the last of the tokens."""
    options = {"distinct": distinct, "own_key_last": own_key_last}
    layout, (order, _, code) = sorted_layout(labels, sets, num_labels, key_padding_mask, **options)
    size = labels.shape[:2]
    order, code, scratch = order.flatten(0, 1), code.flatten(0, 1), Scratch(labels.device)
    rounds = []
    for number in range(order.shape[1]):
        group = Round(order, code, number, layout, torch.float32, scratch)
        everything = slice(0, group.chunks)
        penalty = torch.zeros(group.rows, group.chunks, layout.size, layout.window, device=labels.device)
        group.restrict(penalty, everything)
        queries = (group.index[:, group.main] - query_offset).masked_fill(group.empty[group.main], -1)
        keys = group.windows(group.index, everything)
        rounds.append(
            [
                Tiles(
                    queries.unflatten(1, (group.chunks, layout.size)).unflatten(0, size),
                    keys.unflatten(0, size),
                    (penalty > -HIDDEN / 2).unflatten(0, size),
                    OWN_KEY if own_key_last else None,
                    query_offset,
                )
            ]
        )
    return rounds


def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: tuple[Tensor, ...],
    terms: ScoreTerms,
    query_index: Tensor,
    key_index: Tensor,
    *,
    causal: bool = False,
    query_valid: Tensor | None = None,
    key_valid: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[`clustered_attention`] with terms: query [B, H, T, d] (scaled), key and value [B, H, S, d], tables [H or 1,
    ...]
    -> [B, H, T, d]. The others as there."""
    allowed = torch.ones((), dtype=torch.bool, device=query.device).expand(*query_index.shape, key_index.shape[-1])
    if causal:
        allowed = key_index[..., None, :] <= query_index[..., :, None]
    if key_valid is not None:
        allowed = allowed & key_valid[..., None, :]
    tiles = Tiles(query_index, key_index, allowed)

    def attend(group: slice, query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        own, by_query, by_key = tiles.of_heads(group), terms.by_query(query, tables), terms.by_key(key, tables)
        rows, _ = attend_in_tiles(query, key, value, tables, terms, by_query, by_key, own, dropout)
        used = None if query_valid is None else query_valid[:, group]
        return _mean_of_clusters(rows, own.query_at, used, used, query.shape[2]).to(query.dtype)

    return over_heads(attend, query, key, value, tables, at_once=tiled_heads_at_once(query.shape[0], [[tiles]]))


def _mean_of_clusters(
    rows: Tensor, query_index: Tensor, query_valid: Tensor | None, used: Tensor | None, length: int
) -> Tensor:
    """What clusters found for their tokens [B, H, C, w, d_v], those that are `used`, as a mean for each token
    [B, H, length, d_v]."""
    chosen = torch.ones_like(query_index) if query_valid is None else query_valid
    where, rows = query_index.flatten(2), rows.flatten(2, 3)
    count = rows.new_zeros(*rows.shape[:2], length).scatter_add_(2, where, chosen.flatten(2).to(rows.dtype))
    share = count.clamp_(min=1).reciprocal().gather(2, where)
    share = share if used is None else share * used.flatten(2)
    return sum_rows(rows * share[..., None], where, length)
