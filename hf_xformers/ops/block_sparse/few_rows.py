# SPDX-License-Identifier: Apache-2.0
"""A decoding step of block-sparse attention: a few dense masked rows, which cost less than a plan."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..common.fused import fused_attention
from ..common.kept import kept
from .flex import Places
from .pattern_base import Pattern
from .patterns import causal as causal_order

# Up to this many queries against this many keys, one dense masked row each.
FEW_QUERIES, FEW_KEYS = 4, 8192


def few_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    key_mask: Tensor | None,
    at: Places,
    scale: float,
    *,
    cap: float,
    needs_lse: bool,
    side: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor | None] | None:
    """The engine's contract for a plain call of up to `FEW_QUERIES` queries: the output [B, H, T_q, d_v] and the
    log-sum-exp [B, H, T_q] (None if not needed). side: `side_key`, `side_value` and `side_mask`. None when even those
    rows are long."""
    (heads, q_len), (kv_heads, k_len) = query.shape[1:3], key.shape[1:3]
    # What does not change along the text is found once, and not for every token anew.
    fixed = pattern.needs_length or not pattern.period
    shift = 0 if fixed else min(at.query_offset, at.key_offset) // pattern.period * pattern.period
    places = (at.query_offset - shift, at.query_offset - shift + q_len)
    begin, end, allowed = _seen_by_few(pattern, heads, at.causal, places, at.key_offset - shift, k_len, query.device)
    if end - begin > FEW_KEYS or end == begin:
        return None
    if (begin, end) != (0, k_len):
        key, value = key[:, :, begin:end], value[:, :, begin:end]
    if key_mask is not None:
        seen = key_mask[:, None, None, begin:end]
        allowed = seen.expand(-1, -1, q_len, -1) if allowed is None else allowed & seen
    side_key, side_value, side_mask = side
    if side_key is not None and side_value is not None:
        allowed = _with_side(allowed, side_mask, key, side_key, q_len)
        key, value = torch.cat((key, side_key), dim=2), torch.cat((value, side_value), dim=2)
    if not needs_lse and not cap:
        if q_len == 1 and (allowed is None or allowed.shape[1] == 1):  # heads that share keys, as more queries
            query = query.reshape(query.shape[0], kv_heads, -1, query.shape[3])
            allowed = None if allowed is None else allowed.expand(-1, -1, query.shape[2], -1)
            return fused_attention(query, key, value, allowed, scale=scale).reshape(-1, heads, 1, value.shape[3]), None
        return fused_attention(query, key, value, allowed, scale=scale, enable_gqa=heads != kv_heads), None
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, values = (x[:, :, None].to(dtype) for x in (key, value))
    scores = (scale * query.unflatten(1, (kv_heads, -1)).to(dtype) @ keys.transpose(3, 4)).flatten(1, 2)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if allowed is None:
        allowed = torch.ones_like(scores[:1, :1], dtype=torch.bool)
    scores = scores.masked_fill(~allowed, torch.finfo(dtype).min)
    weights = scores.softmax(-1)
    lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    weights = weights.masked_fill(~allowed, 0.0)
    out = (weights.unflatten(1, (kv_heads, -1)) @ values).flatten(1, 2)
    return out.to(query.dtype), lse.masked_fill(~allowed.any(-1, keepdim=True), -math.inf)[..., 0]


def _with_side(
    allowed: Tensor | None, side_mask: Tensor | None, key: Tensor, side_key: Tensor, q_len: int
) -> Tensor | None:
    """Which of the keys and of the side keys behind them may be read, [B or 1, H or 1, q, k + S]; None: all."""
    if allowed is None and side_mask is None:
        return None
    if allowed is None:
        allowed = key.new_ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    if side_mask is None:
        side_mask = side_key.new_ones(1, side_key.shape[2], dtype=torch.bool)
    beside = side_mask[:, None, None] if side_mask.ndim == 2 else side_mask[:, None]
    rows, per_head = max(allowed.shape[0], beside.shape[0]), allowed.shape[1]
    parts = [part.expand(rows, per_head, q_len, -1) for part in (allowed, beside)]
    return torch.cat(parts, dim=-1)


@kept(64)
def _seen_by_few(
    pattern: Pattern, heads: int, causal: bool, places: tuple[int, int], offset: int, k_len: int, device: torch.device
) -> tuple[int, int, Tensor | None]:
    """The first and the last key, of `k_len` from `offset` on, that queries at these `places` may read, and which of
    those between them [1, H or 1, q, k]; None: all."""
    bound = (pattern & causal_order() if causal else pattern).bind(offset + k_len)
    low, high = bound.span(places[0], places[1] - 1)
    begin = 0 if low is None else min(max(low - offset, 0), k_len)
    end = k_len if high is None else min(max(high - offset + 1, begin), k_len)
    if end - begin > FEW_KEYS or (bound.solid and places[1] - places[0] == 1):
        return begin, end, None
    q_at = torch.arange(*places, device=device)[:, None]
    k_at = torch.arange(offset + begin, offset + end, device=device)[None]
    own = [bound.for_head(head) for head in range(heads)]
    distinct = {each: each.allows(q_at, k_at) for each in set(own)}
    allowed = torch.stack([distinct[each] for each in own]) if len(distinct) > 1 else distinct[own[0]][None]
    everything = device.type == "cpu" and bool(allowed.all())  # elsewhere looking costs more than a mask
    return begin, end, None if everything else allowed[None]
