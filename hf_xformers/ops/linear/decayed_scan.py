# SPDX-License-Identifier: Apache-2.0
"""Linear attention whose state decays: retention, state space duality, gated linear attention.

    S_t = Diag(a_t) S_{t-1} + k_t^T v_t,    out_t = q_t S_t,    a_t = e^{log_decay_t},

with one decay for a head, which may be constant (Sun et al. 2023, arXiv 2307.08621, equation 5) or of the token (Dao
and Gu 2024, arXiv 2405.21060, section 3), or one for every channel of a key (Yang et al. 2024, arXiv 2312.06635,
equation 3). There is no denominator and no scale; both are the caller's, a denominator as a column of ones in `value`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.padding import check_padding_mask
from ..common.products import without_autocast
from ..common.segments import accumulation_dtype
from .gated_chunks import scan_in_chunks


def decayed_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
        query, key: `[B, G, T, K]`; value head h reads those of head h // (H / G).
        value: values, `[B, H, T, dv]`; G divides H.
        log_decay: logarithms, not above 0, of what is left of the state when a token arrives: `[H]`, `[B, H, T]`, or
            `[B, H, T, K]`, one for each channel of a key. -inf forgets everything.
        key_padding_mask: `[B, T]`, True = real token; a padded token, wherever it stands, leaves the state as it is.
        segment_ids: `[B, T]`, the document of each token in packed rows; none reads what another one has written. A
            given `state` is that of the first.
        state: `[B, H, K, dv]`, what earlier tokens left.
        return_state: also return the state after the last token, in float32 (float64 for float64 values).
        chunk_size: tokens per quadratic block, rounded up to a power of two.

    Returns:
        `[B, H, T, dv]` in the dtype of `value`; with `return_state` also the state.

    Raises:
        ValueError: shapes that do not fit, a mask that is not `[B, T]`, or `chunk_size < 1`.
        RuntimeError: a derivative of the derivative is asked for.
    """
    log_decay = check_recurrence(query, key, value, log_decay, key_padding_mask, state, chunk_size)
    if key.shape[2] == 1:
        out, state = decayed_step(query, key, value, log_decay, key_padding_mask, state)
        return (out, state) if return_state else out
    if key_padding_mask is not None:
        key = key.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
    log_decay = forgetting(log_decay, key_padding_mask, segment_ids)
    query, key = for_channels(query, log_decay), for_channels(key, log_decay)
    chunk = power_of_two(chunk_size, key.shape[2])
    out, state = scan_in_chunks(query, key, value, None, log_decay, state, chunk, segment_ids is None)
    return (out, state) if return_state else out


def decayed_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, mask: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, `[B, G or H, 1, *]`, log_decay `[B, H, 1]` or `[B, H, 1, K]`: what it reads, and the state after."""
    wide = accumulation_dtype(value.dtype)
    with without_autocast(value):
        q, k, v, left = for_step(query, key, value, log_decay, mask)
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], 0.0)
        state = k.mT * v if state is None else torch.addcmul(left * state.to(wide), k.mT, v)
        return (q @ state).to(value.dtype), state


def check_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """log_decay of every token, after a look at all shapes."""
    batch, groups, length, width = key.shape
    heads = value.shape[1]
    if query.shape != key.shape or value.shape[::2] != (batch, length) or heads % groups:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must be [B, G, T, K],"
            " [B, G, T, K] and [B, H, T, dv], where G divides H."
        )
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(batch, -1, length)
    if log_decay.shape not in ((batch, heads, length), (batch, heads, length, width)):
        raise ValueError(
            f"log_decay must be [H], [B, H, T] or [B, H, T, K], here of {(heads,)}, {(batch, heads, length)} or"
            f" {(batch, heads, length, width)}, got {tuple(log_decay.shape)}."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    check_padding_mask(mask, batch, length)
    shape = batch, heads, width, value.shape[3]
    if state is not None and state.shape != shape:
        raise ValueError(f"state has shape {tuple(state.shape)}, but these keys and values need {shape}.")
    return log_decay


def forgetting(log_decay: Tensor, mask: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """0 at padding, -inf where a document begins: log_decay `[B, H, T]` or `[B, H, T, K]`."""
    if mask is not None:
        keep = mask[:, None] if log_decay.dim() == 3 else mask[:, None, :, None]
        log_decay = log_decay.masked_fill(~keep, 0.0)
    if segment_ids is not None:
        first = torch.zeros_like(segment_ids, dtype=torch.bool)
        first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        first = first[:, None] if log_decay.dim() == 3 else first[:, None, :, None]
        log_decay = log_decay.masked_fill(first, -torch.inf)
    return log_decay


def for_channels(x: Tensor, log_decay: Tensor) -> Tensor:
    """Queries or keys [B, G, T, K], one for each of the heads whose channels decay in their own way."""
    shared = log_decay.shape[1] // x.shape[1]
    return x.repeat_interleave(shared, dim=1) if shared > 1 and log_decay.dim() == 4 else x


def for_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key `[B, H, 1, K]`, value `[B, H, 1, dv]` and what is left of the state, `[B, H, 1 or K, 1]`, in the type
    of the state."""
    wide, shared = accumulation_dtype(value.dtype), value.shape[1] // key.shape[1]
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if shared > 1:
        query, key = (x.repeat_interleave(shared, dim=1) for x in (query, key))
    log_decay = log_decay.to(wide)[..., None] if log_decay.dim() == 3 else log_decay.to(wide).mT
    if mask is not None:
        log_decay = log_decay.masked_fill(~mask[:, None, :, None], 0.0)
    return query, key, value, log_decay.exp()


def power_of_two(chunk_size: int, length: int) -> int:
    """Tokens per chunk of a text of so many."""
    least = chunk_size if isinstance(length, torch.SymInt) else min(chunk_size, length)
    return 1 << (least - 1).bit_length()
