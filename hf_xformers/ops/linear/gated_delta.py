# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state that decays before it is corrected.

    S_t = (I - beta_t k_t^T k_t) Diag(a_t) S_{t-1} + beta_t k_t^T v_t,    out_t = q_t S_t,    a_t = e^{log_decay_t},

with one decay for a head (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, equation 10) or one for every channel of
a key (Kimi Team 2025, arXiv 2510.26692, equation 1). Without decays it is the delta rule of `delta_rule`, as which it
is computed: a triangular system for each chunk. Stability needs `beta |k|^2 <= 2`, which keys of length one have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.products import without_autocast
from ..common.segments import accumulation_dtype
from .decayed_scan import check_recurrence, for_channels, for_step, forgetting, power_of_two
from .gated_chunks import scan_in_chunks


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence above over a text, in chunks: time O(T (C (K + dv) + K dv)) per head, memory O(T D).

    Args:
        beta: writing strengths, `[B, H, T]`.
    The others, the result and the errors are those of [`decayed_scan`].
    """
    log_decay = check_recurrence(query, key, value, log_decay, key_padding_mask, state, chunk_size)
    if beta.shape != value.shape[:3]:
        raise ValueError(f"beta must be [B, H, T], here {tuple(value.shape[:3])}, got {tuple(beta.shape)}.")
    if key.shape[2] == 1:
        out, state = gated_delta_step(query, key, value, beta, log_decay, key_padding_mask, state)
        return (out, state) if return_state else out
    if key_padding_mask is not None:
        key = key.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
        beta = beta.masked_fill(~key_padding_mask[:, None], 0.0)
    log_decay = forgetting(log_decay, key_padding_mask, segment_ids)
    query, key = for_channels(query, log_decay), for_channels(key, log_decay)
    chunk = power_of_two(chunk_size, key.shape[2])
    out, state = scan_in_chunks(query, key, value, beta, log_decay, state, chunk, segment_ids is None)
    return (out, state) if return_state else out


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One token, `[B, G or H, 1, *]`, beta and log_decay `[B, H, 1]`, or this `[B, H, 1, K]`: what it reads, and the
    state after."""
    wide = accumulation_dtype(value.dtype)
    with without_autocast(value):
        q, k, v, left = for_step(query, key, value, log_decay, mask)
        strength = beta.to(wide)[..., None]
        if mask is not None:
            strength = strength.masked_fill(~mask[:, None, :, None], 0.0)
        if state is None:
            state = k.mT * (strength * v)
        else:
            state = left * state.to(wide)
            state = torch.addcmul(state, k.mT, strength * (v - k @ state))
        return (q @ state).to(value.dtype), state
