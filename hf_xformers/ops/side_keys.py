# SPDX-License-Identifier: Apache-2.0
"""Softmax attention to a few keys that have no place among the tokens, and its union with attention to others."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .common.products import wide_products
from .score_terms.tiles import over_heads

# Scores (over batch and heads) that are there at once, in a few copies: 4 MiB each in float32.
SCORES_AT_ONCE = 1 << 20


def side_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    rows: Tensor,
    seen: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax_s(scale * q_i k_s + bias[row_i, s]) v_s, and the logarithm of its denominator (-inf where nothing is
    seen).

    query [B, H, T, d]; key, value [B, H, S, d]; bias [H, R, S]; rows [B or 1, T]: the row of the bias that each query
    has; seen [B or 1, S] boolean -> [B, H, T, d] and [B, H, T], float32 at least. cap: c, where scaled scores become
    c tanh(scores / c) before the bias. Time O(T S d); the scores of a few heads are there at once, also in training.
    """
    hidden = ~seen[:, None, None]

    def attend(group: slice, query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        scores = wide_products(query, key) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        found = tables[0].to(scores.dtype).index_select(1, rows.flatten()).unflatten(1, rows.shape)
        scores = (scores + found.transpose(0, 1)).masked_fill(hidden, torch.finfo(scores.dtype).min)
        norm = scores.logsumexp(-1, keepdim=True)
        weights = (scores - norm).exp().masked_fill(hidden, 0.0)
        weights = (F.dropout(weights, dropout) if dropout else weights).to(value.dtype)
        output = torch.matmul(weights, value).to(scores.dtype)
        return torch.cat([output, norm.masked_fill(hidden.all(-1, keepdim=True), -math.inf)], dim=-1)

    at_once = max(SCORES_AT_ONCE // max(query.shape[0] * query.shape[2] * key.shape[2], 1), 1)
    both = over_heads(attend, query, key, value, (bias,), at_once)
    return both[..., :-1], both[..., -1]


def joined(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to two sets of keys as one softmax over both: each is its output [B, H, T, d] and the logarithm of its
    denominator [B, H, T], -inf where it has seen nothing (and its output is 0). In float32 at least."""
    norms = torch.stack([norm.to(torch.promote_types(norm.dtype, torch.float32)) for _, norm in (first, second)])
    lowest = torch.finfo(norms.dtype).min / 4  # finite, so that a query without any key has a gradient of 0
    shares = torch.softmax(norms.clamp(min=lowest), dim=0)[..., None]
    return first[0] * shares[0] + second[0] * shares[1]
