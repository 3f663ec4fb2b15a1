# SPDX-License-Identifier: Apache-2.0
"""Which tokens experts take: groups, capacities, and the losses that balance a router."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Call


def real_tokens(hidden_states: Tensor, context: Call | None) -> Tensor:
    """[B * T] boolean, True = real."""
    mask = None if context is None else context.query_padding_mask
    if mask is None:
        return hidden_states.new_ones(hidden_states.shape[0] * hidden_states.shape[1], dtype=torch.bool)
    return mask.reshape(-1)


def documents(hidden_states: Tensor, context: Call | None) -> Tensor:
    """[B * T] number of each token's text, 0 <= number < B * T: its row, or its document in packed rows."""
    batch, length = hidden_states.shape[:2]
    rows = torch.arange(batch, device=hidden_states.device)[:, None] * length
    segments = None if context is None else context.segment_ids
    return (rows.expand(batch, length) if segments is None else rows + segments).reshape(-1)


def groups(texts: Tensor, real: Tensor, size: int) -> Tensor:
    """[N] number of each real token's group, 0 <= number < N: every `size` real tokens of a text, from its first, are
    one.

    A text's tokens follow each other, as [`documents`] numbers them; what stands at padding means nothing.
    """
    rank = places(torch.where(real, texts, texts.shape[0]))
    return ((real & (rank % size == 0)).cumsum(0) - 1).clamp(min=0)


def places(keys: Tensor) -> Tensor:
    """keys [n] integers -> how many earlier entries have the same key: a place in its queue, counted from 0."""
    ordered, order = torch.sort(keys, stable=True)
    rank = torch.arange(keys.shape[0], device=keys.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(rank).scatter_(0, order, rank)


def capacities(texts: Tensor, real: Tensor, num_experts: int, factor: float) -> Tensor:
    """[N]: how many tokens an expert takes of each token's text: ceil(factor * real tokens of the text /
    num_experts)."""
    counts = torch.zeros_like(texts).scatter_add_(0, texts, real.long())[texts]
    parts = round(factor * 10_000)  # in whole numbers: 1.1 * 10 must not become 12
    return -(-counts * parts // (num_experts * 10_000))


def within_capacity(
    chosen: Tensor,
    texts: Tensor,
    real: Tensor,
    num_experts: int,
    factor: float | None,
    priority: Tensor | None = None,
    limit: int | None = None,
) -> Tensor:
    """Which assignments are kept: chosen [N, k] -> boolean [N, k].

    Every text (or group of [`groups`]) has its own queue at every expert, in token order or by falling `priority` [N];
    all first choices stand before all second ones. factor: of the tokens that are an expert's part; limit: a number of
    tokens; None: no such capacity. Padding and assignments to nowhere are never kept and take no place.
    """
    kept = real[:, None] & (chosen < num_experts)
    if factor is None and limit is None:
        return kept
    if priority is not None:
        order = torch.sort(priority, descending=True, stable=True).indices
        first = within_capacity(chosen[order], texts[order], real[order], num_experts, factor, limit=limit)
        return torch.empty_like(first).index_copy_(0, order, first)
    keys = torch.where(kept, texts[:, None] * num_experts + chosen, texts.shape[0] * num_experts)
    place = places(keys.T.reshape(-1)).view(chosen.shape[1], -1).T
    if limit is not None:
        kept = kept & (place < limit)
    return kept if factor is None else kept & (place < capacities(texts, real, num_experts, factor)[:, None])


def mean_over(values: Tensor, real: Tensor) -> Tensor:
    """values [N, ...] -> their mean over real tokens, zeros where there are none."""
    mask = real.view(-1, *[1] * (values.ndim - 1))
    return values.masked_fill(~mask, 0.0).sum(0) / real.sum().clamp(min=1)


def balance_loss(probabilities: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
    """E * sum_e f_e P_e: f_e the share of real tokens whose (first) choice is e, P_e the mean probability of e.

    Fedus et al. 2022, eqs. 4-6. 1 at balance; gradients flow through P alone. probabilities [N, E], chosen [N].
    """
    num_experts = probabilities.shape[-1]
    share = mean_over(F.one_hot(chosen, num_experts).to(probabilities.dtype), real)
    return num_experts * (share * mean_over(probabilities, real)).sum()


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    """Mean over real tokens of (logsumexp of the logits)^2 (Zoph et al. 2022, arXiv 2202.08906, eq. 5)."""
    return mean_over(torch.logsumexp(logits, -1).square(), real)
