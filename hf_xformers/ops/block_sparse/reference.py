# SPDX-License-Identifier: Apache-2.0
"""Attention over a pattern as the dense equation says it: the oracle of the fast engine, and the path with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..common.padding import row_spans
from ..common.products import masked_softmax, wide_products
from .pattern_base import Pattern, PerHead

ScoreBias = Callable[[Tensor, Tensor], Tensor]


def counts_positions(pattern: Pattern, score_bias: ScoreBias | None, bias_is_relative: bool) -> bool:
    """Whether anything depends on positions and not only on distances."""
    return pattern.period != 1 or (score_bias is not None and not bias_is_relative)


def block_sparse_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    key_padding_mask: Tensor | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    bias_is_relative: bool = False,
    segment_ids: Tensor | None = None,
    global_mask: Tensor | None = None,
    global_query: Tensor | None = None,
    global_key: Tensor | None = None,
    global_value: Tensor | None = None,
    side_key: Tensor | None = None,
    side_value: Tensor | None = None,
    side_mask: Tensor | None = None,
    score_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The arguments and meaning of `block_sparse_attention`, computed with T x T scores, a mask and one softmax.

    Returns:
        the output [B, H, T_q, d_v] and the weights [B, H, T_q, T_k] ([.., T_k + S] with side keys), zero where hidden.
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    pattern = PerHead(tuple(pattern)) if isinstance(pattern, Sequence) else pattern
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    lead, lengths = (x[:, None] for x in row_spans(real))
    lead = lead if counts_positions(pattern, score_bias, bias_is_relative) else torch.zeros_like(lead)
    q_at = torch.arange(query_offset, query_offset + query.shape[2], device=query.device) - lead
    k_at = torch.arange(key_offset, key_offset + key.shape[2], device=query.device) - lead
    pairs = (q_at[:, :, None], k_at[:, None, :])
    within = (*pairs, key_offset + lengths[..., None])
    allowed = torch.stack([pattern.for_head(head).allows_within(*within) for head in range(heads)], 1)

    def scores(query: Tensor, key: Tensor) -> Tensor:
        products = wide_products(query, key.repeat_interleave(groups, 1)) * scale
        return products if score_cap is None else score_cap * torch.tanh(products / score_cap)

    logits, values = scores(query, key), value.repeat_interleave(groups, 1)
    if score_bias is not None:
        logits = logits + score_bias(q_at.clamp(min=0), k_at.clamp(min=0))
    if global_mask is not None:
        allowed = allowed | (global_mask & real)[:, None, None, :]
    if causal:
        allowed = allowed & (pairs[1] <= pairs[0])[:, None]
    if segment_ids is not None:
        first = query_offset - key_offset
        own = segment_ids[:, first : first + query.shape[2]]
        allowed = allowed & (own[:, None, :, None] == segment_ids[:, None, None, :])
    allowed = allowed & real[:, None, None, :]
    if side_key is not None and side_value is not None:
        if side_mask is None:
            side_mask = torch.ones_like(side_key[:, 0, :, 0], dtype=torch.bool)
        side_mask = side_mask[:, None, None] if side_mask.ndim == 2 else side_mask[:, None]
        allowed = torch.cat([allowed, side_mask.expand(-1, heads, query.shape[2], -1)], 3)
        logits = torch.cat([logits, scores(query, side_key)], 3)
        values = torch.cat([values, side_value.repeat_interleave(groups, 1)], 2)
    weights = masked_softmax(logits, allowed & (q_at >= 0)[:, None, :, None]).to(value.dtype)
    out = torch.dropout(weights, dropout, dropout > 0) @ values
    if global_mask is not None and not causal:
        # Rows of global tokens: every real key, with their own projections where given.
        logits = scores(query if global_query is None else global_query, key if global_key is None else global_key)
        row_weights = masked_softmax(logits, real[:, None, None, :]).to(value.dtype)
        row_values = (value if global_value is None else global_value).repeat_interleave(groups, 1)
        is_row = (global_mask & real)[:, None, :, None]
        out = torch.where(is_row, torch.dropout(row_weights, dropout, dropout > 0) @ row_values, out)
        weights = torch.where(is_row, row_weights, weights)
    return out, weights
