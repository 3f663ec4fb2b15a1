# SPDX-License-Identifier: Apache-2.0
"""Attention in buckets and clusters over all pairs, counting how often each key is in a query's sets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.products import wide_products
from .sets import OWN_KEY, Chunks, Recent


def bucketed_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    sets: Recent | Chunks,
    *,
    query_index: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    distinct: bool = True,
    own_key_last: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same over all pairs: count how often each key is in a query's sets, then one softmax.

    Args:
        query: [B, H, T, d]; key, value: [B, H, S, d]; labels [B, H, R, S].
        query_index: [T], slots of the queries among the S tokens (default: all of them).
        bias: added to the scaled scores, broadcastable to [B, H, T, S].
        The others as in :func:`bucketed_attention`.

    Returns:
        Output [B, H, T, d_v] and weights [B, H, T, S], zero where nothing is read.
    """
    keys = torch.arange(key.shape[2], device=key.device)
    queries = keys if query_index is None else query_index
    real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    real_query = real.index_select(1, queries)
    pairs = real_query[:, None, :, None] & real[:, None, None, :]
    later, own = keys[None, :] > queries[:, None], keys[None, :] == queries[:, None]
    counts = query.new_zeros(*query.shape[:3], keys.shape[0])
    if isinstance(sets, Chunks):
        rank = _ranks(labels, real)
        chunks = -(-keys.shape[0] // sets.size)
    for a in range(labels.shape[2]):
        same = labels[:, :, a].index_select(2, queries)[..., None] == labels[:, :, a, None, :]
        if isinstance(sets, Recent):
            mates = same & pairs & ~later
            # How many mates stand between key and query, both included: at most the window and the query itself.
            nearer = mates.flip(-1).cumsum(-1).flip(-1)
            counts += mates & (nearer <= sets.window + 1)
            continue
        chunk = rank[:, :, a].index_select(2, queries)[..., None] // sets.size
        for b in range(labels.shape[2]) if sets.circular else (a,):
            away = rank[:, :, b, None, :] // sets.size + chunks * (b - a) - chunk
            if sets.circular:
                ring = chunks * labels.shape[2]
                near = ((-away) % ring <= sets.before) | (away % ring <= sets.after)
            else:
                near = (away >= -sets.before) & (away <= sets.after)
            near = near & pairs
            if sets.own_label:
                near = near & same
            if sets.causal:
                near = near & ~later
            counts += near
    if distinct:
        counts = counts.clamp(max=1)
    scores = wide_products(query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if own_key_last:
        scores = scores.masked_fill(own, OWN_KEY)
    hidden = counts == 0
    scores = (scores + counts.to(scores.dtype).clamp(min=1).log()).masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0).to(query.dtype)
    return torch.dropout(weights, dropout, dropout > 0) @ value, weights


def clustered_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    *,
    causal: bool = False,
    query_valid: Tensor | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same over all pairs, cluster by cluster: output [B, H, T, d_v] and weights [B, H, T, S]. bias: added to the
    scaled scores, broadcastable to [B, H, T, S]."""
    scores = wide_products(query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    weights, count = torch.zeros_like(scores), torch.zeros_like(scores[..., :1])
    later = (
        torch.arange(key.shape[2], device=key.device)[None, :]
        > torch.arange(query.shape[2], device=query.device)[:, None]
    )
    for cluster in range(query_index.shape[2]):
        asks, answers = scores.new_zeros(scores.shape[:3]), scores.new_zeros(*scores.shape[:2], scores.shape[3])
        for member, index, used in ((asks, query_index, query_valid), (answers, key_index, key_valid)):
            places = index[:, :, cluster]
            member.scatter_(2, places, 1.0 if used is None else 0.0)
            if used is not None:
                member.scatter_add_(2, places, used[:, :, cluster].to(member.dtype))
        allowed = (asks[..., None] > 0) & (answers[..., None, :] > 0)
        if causal:
            allowed = allowed & ~later
        part = torch.softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min), dim=-1)
        weights = weights + part.masked_fill(~allowed, 0.0)
        count = count + asks[..., None]
    weights = (weights / count.clamp(min=1)).to(query.dtype)
    return torch.dropout(weights, dropout, dropout > 0) @ value, weights


def _ranks(labels: Tensor, real: Tensor) -> Tensor:
    """[B, H, R, S] -> each token's place in the order by (padding, label, position), counted pair by pair."""
    last = labels.masked_fill(~real[:, None, None], int(labels.max()) + 1 if labels.numel() else 0)
    places = torch.arange(labels.shape[-1], device=labels.device)
    smaller = last[..., None, :] < last[..., :, None]
    equal = (last[..., None, :] == last[..., :, None]) & (places[None, :] < places[:, None])
    return (smaller | equal).sum(-1)
