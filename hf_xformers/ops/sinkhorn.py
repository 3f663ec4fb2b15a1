# SPDX-License-Identifier: Apache-2.0
"""Sorting of blocks by a relaxed permutation, and attention to the sorted block next to a query's own.

Tay, Bahri, Yang, Metzler and Juan 2020, "Sparse Sinkhorn Attention" (arXiv 2002.11296), section 3. Texts come in
blocks of `b` tokens with real tokens first: only a row's last blocks may hold padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common.fused import fused_attention

HIDDEN = -1e9  # of scores; in a logarithm that is exponentiated, as far as any number is
_LEAST_MASS = 1e-20


class Sorted(NamedTuple):
    """Sorted keys and values `[B, H, N, b, d]` of N blocks, and how much of each place is real text `[B, H, N, b]`."""

    key: Tensor
    value: Tensor
    mass: Tensor


def sinkhorn(scores: Tensor, allowed: Tensor, iterations: int, causal: bool) -> Tensor:
    """Weights `[B, H, n, n]` of blocks (columns) in each sorted block (row): rows sum to one where anything is
    allowed, to zero elsewhere, and columns nearly so.

    In turn rows and columns are divided by their sums, rows last (Sinkhorn and Knopp 1967), in logarithms. causal: a
    column is divided, in each row, by its sum down to that row, so that no row knows of a later one.

    scores `[B, H, n, n]`, float32 at least; allowed, boolean, broadcastable to it.
    """
    log = scores.masked_fill(~allowed, HIDDEN)
    for _ in range(iterations):
        log = (log - log.logsumexp(-1, keepdim=True)).masked_fill(~allowed, HIDDEN)
        total = log.logcumsumexp(-2) if causal else log.logsumexp(-2, keepdim=True)
        log = (log - total).masked_fill(~allowed, HIDDEN)
    return torch.softmax(log, dim=-1).masked_fill(~allowed, 0.0)


def sort_blocks(weights: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> Sorted:
    """Place s of sorted block c is the mean, by `weights` [B, H, N, n], of place s of all blocks that have a token
    there: key and value `[B, H, n, b, d]`, real `[B, n, b]`, True = token; None: all are."""
    dtype = weights.dtype
    if real is None:
        mass = weights.sum(-1, keepdim=True).expand(*weights.shape[:3], key.shape[3])
    else:
        mass = weights @ real[:, None].to(dtype)

    def mixed(x: Tensor) -> Tensor:
        x = x if real is None else x.masked_fill(~real[:, None, ..., None], 0.0)
        total = (weights @ x.flatten(3).to(dtype)).unflatten(-1, x.shape[3:])
        return (total if real is None else total / mass.clamp(min=_LEAST_MASS)[..., None]).to(x.dtype)

    return Sorted(mixed(key), mixed(value), mass)


def with_mass(query: Tensor, key: Tensor, mass: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Queries and keys one channel wider, so that a score has log(mass) of its key added to it."""
    one = torch.ones_like(query[..., :1])
    log = torch.zeros_like(key[..., 0]) if mass is None else (mass.clamp(min=_LEAST_MASS).log() / scale).to(key.dtype)
    return torch.cat([query, one], dim=-1), torch.cat([key, log[..., None]], dim=-1)


def near_and_sorted(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Sorted,
    visible: Tensor | None,
    *,
    scale: float,
    dropout: float,
    weigh: bool,
) -> Tensor:
    """One softmax over a block of its own and a sorted one: query `[B, H, N, t, d]`, key and value `[B, H, N, b, d]`
    -> `[B, H, N, t, d]`. A query that sees nothing gets zeros.

    visible: boolean, broadcastable to `[B, H, N, t, b]`, which of the own block a query sees; None: all, and all
    sorted places have tokens. weigh: some sorted places may have a token in some of their blocks alone.
    """
    other = chosen.key
    if weigh:
        width = query.shape[-1]
        query, key = with_mass(query, key, None, scale)
        other = with_mass(query[..., :width], other, chosen.mass, scale)[1]
    keys, values, mask = torch.cat([other, key], dim=3), torch.cat([chosen.value, value], dim=3), None
    if visible is not None:
        there = (chosen.mass > _LEAST_MASS)[..., None, :].expand(*query.shape[:4], -1)
        mask = torch.cat([there, visible.expand(*query.shape[:4], -1)], dim=-1).flatten(1, 2)
    # The blocks of all heads side by side are the heads of one call.
    query, keys, values = (x.flatten(1, 2) for x in (query, keys, values))
    blind = None if mask is None else ~mask.any(-1, keepdim=True)  # such queries see everything, and read nothing
    mask = mask if mask is None or blind is None else mask | blind
    output = fused_attention(query, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale)
    if blind is not None:
        output = output.masked_fill(blind, 0.0)
    return output.unflatten(1, chosen.value.shape[1:3])
