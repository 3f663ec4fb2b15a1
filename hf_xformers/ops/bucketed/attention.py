# SPDX-License-Identifier: Apache-2.0
"""Softmax attention among tokens that share a bucket: sort by content, attend in chunks, scatter back.

Every token carries one label (bucket, cluster) per round. In a round, tokens are ordered by (label, position) and read
near tokens in that order; :class:`Recent` and :class:`Chunks` say which. A query's result is one softmax over the
union of its rounds (Kitaev et al. 2020, arXiv 2001.04451, appendix A), or over the multiset, in which a key counts
once per round.

:func:`bucketed_attention` is the fast engine, :func:`bucketed_reference` the literal equation over all pairs, and
:func:`clustered_attention` serves clusters that choose their tokens (balanced k-means) instead of tokens choosing one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.tile_engines import autocast_inputs
from .cluster_op import forward_op as clusters_op
from .op import default_chunk, forward_op, sorted_codes
from .reference import bucketed_reference, clustered_reference
from .rounds import HIDDEN, Layout, Round
from .sets import OWN_KEY, Chunks, Recent

__all__ = [
    "HIDDEN",
    "OWN_KEY",
    "Chunks",
    "Recent",
    "Round",
    "bucketed_attention",
    "bucketed_reference",
    "clustered_attention",
    "clustered_reference",
    "sorted_layout",
]


def bucketed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    sets: Recent | Chunks,
    *,
    num_labels: int,
    key_padding_mask: Tensor | None = None,
    distinct: bool = True,
    own_key_last: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of every token to the tokens near it in the order of each round.

    Time O(R T W d) and memory O(T d) for R rounds and windows of W tokens; with `distinct`, O(R^2 T W) cheap
    comparisons.

    Args:
        query, key, value: [B, H, T, d], [B, H, T, d] and [B, H, T, d_v]; any T.
        labels: [B, H, R, T] integers, 0 <= label < num_labels.
        sets: which tokens a query reads.
        key_padding_mask: [B, T], True for a real token. Others are read by none and give zeros, also in the gradient.
        distinct: a key that several rounds hold counts once (else once per round).
        own_key_last: a token reads itself only if there is nothing else (shared queries and keys); its own score is
            the constant -1e5.
        scale: factor on scores, by default 1 / sqrt(d).
        dropout: dropout on the weights of each round.

    Returns:
        [B, H, T, d_v].

    Raises:
        ValueError: shapes do not fit together, or options have no meaning together.
    """
    _check(query, key, value, labels, key_padding_mask, dropout)
    if query.shape[2] == 0:
        return torch.zeros_like(value)
    with torch.no_grad():
        layout, (order, rank, code) = sorted_layout(
            labels,
            sets,
            num_labels,
            key_padding_mask,
            distinct=distinct,
            own_key_last=own_key_last,
        )
        # The seed comes from the global generator, as for any dropout, and is replayed by gradient checkpointing.
        seed = torch.randint(2**31, ()) if dropout > 0 else None
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    query, key, value = autocast_inputs(query, key, value)
    return forward_op(query, key, value, order, rank, code, key_padding_mask, seed, layout.to_list(), scale, dropout)[
        0
    ]


def sorted_layout(
    labels: Tensor,
    sets: Recent | Chunks,
    num_labels: int,
    key_padding_mask: Tensor | None,
    *,
    distinct: bool,
    own_key_last: bool,
) -> tuple[Layout, tuple[Tensor, Tensor, Tensor]]:
    """How the tokens of each round stand in chunks: the layout, and order, rank and codes, [B, H, R, T] each.

    Raises:
        ValueError: a circular order of distinct keys.
    """
    if isinstance(sets, Chunks) and sets.circular and distinct:
        raise ValueError("A circular order counts a key once per window; set distinct=False.")
    length, rounds = labels.shape[3], labels.shape[2]
    distinct = distinct and rounds > 1
    if isinstance(sets, Recent):
        size = default_chunk(sets.window, length)
        before = min(-(-sets.window // size), -(-length // size) - 1)
        layout = Layout(size, before, 0, 0, sets.window, False, False, own_key_last, distinct)
        recent, own_label = sets.window, True
    else:
        chunks = -(-length // sets.size)
        ring = chunks * rounds if sets.circular else chunks
        before = min(sets.before, ring - 1)
        after = min(sets.after, ring - 1 - before if sets.circular else ring - 1)
        bounds = (0, 0) if sets.circular else (-after, before)
        layout = Layout(sets.size, before, after, *bounds, sets.causal, sets.circular, own_key_last, distinct)
        recent, own_label = None, sets.own_label
    return layout, sorted_codes(labels, key_padding_mask, num_labels, recent, layout, own_label)


def clustered_attention(
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
) -> Tensor:
    """Attention inside clusters that have chosen their tokens: gather, attend, scatter the mean back.

    A token that several clusters chose gets the mean of its results, one that none chose gets zeros (Roy et al. 2021,
    arXiv 2003.05997, algorithm 1). Time O(C w^2 d), memory O(C w d).

    Args:
        query, key, value: [B, H, T, d], [B, H, S, d], [B, H, S, d_v].
        query_index, key_index: [B, H, C, w] and [B, H, C, u], the tokens of each cluster; where `causal`, by rising
            position.
        causal: a query reads keys at its own position and before.
        query_valid, key_valid: boolean, shaped like the indices; False for a place that is not used.

    Returns:
        [B, H, T, d_v].
    """
    with torch.no_grad():
        seed = torch.randint(2**31, ()) if dropout > 0 else None  # as in `bucketed_attention`
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    inputs = (*autocast_inputs(query, key, value), query_index, key_index, query_valid, key_valid)
    return clusters_op(*inputs, seed, causal, scale, dropout)[0]


def _check(
    query: Tensor, key: Tensor, value: Tensor, labels: Tensor, key_padding_mask: Tensor | None, dropout: float
) -> None:
    if query.ndim != 4 or query.shape != key.shape or query.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must be [B, H, T, d], "
            "[B, H, T, d] and [B, H, T, d_v]: every token is a query and a key."
        )
    if labels.ndim != 4 or (*labels.shape[:2], labels.shape[3]) != tuple(query.shape[:3]):
        raise ValueError(
            f"labels must be [B, H, rounds, T] for a query {tuple(query.shape)}, got {tuple(labels.shape)}."
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are bucket numbers; give integers, not {labels.dtype}.")
    if key_padding_mask is not None and (
        key_padding_mask.dtype != torch.bool or tuple(key_padding_mask.shape) != (query.shape[0], query.shape[2])
    ):
        raise ValueError(
            f"key_padding_mask must be a boolean mask [B, T] = {(query.shape[0], query.shape[2])} of real tokens, got "
            f"{key_padding_mask.dtype} {tuple(key_padding_mask.shape)}."
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} is not a probability below 1.")
