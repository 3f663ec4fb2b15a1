# SPDX-License-Identifier: Apache-2.0
"""A state that decays and is corrected where others than its corrections are read: RWKV-7's generalized delta rule.

    S_t = (I - w_t^T r_t) Diag(a_t) S_{t-1} + k_t^T v_t,    out_t = q_t S_t,    a_t = e^{log_decay_t},

with a decay for every channel of a key (Peng et al. 2025, arXiv 2503.14456, section 3). With r = k and w = beta k, and
beta k in place of k, it is the gated delta rule. RWKV-7 reads the state before it decays, which is r_t = r'_t / a_t.

In chunks, with D, e^b and e^c as in `gated_chunks` and S the state before the chunk:

    (I + strictlower(R W^T D)) U = strictlower(R K^T D) V + (R e^b) S,
    out = (Q e^b) S + lower(Q K^T D) V - lower(Q W^T D) U,        S <- e^{b_C} S + (K e^c)^T V - (W e^c)^T U.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..common.products import without_autocast
from ..common.segments import accumulation_dtype, in_one_batch, segments, to_chunks
from .chunk_decay import ChunkDecay, numbers_at_once
from .decayed_scan import check_recurrence, for_step, forgetting, power_of_two
from .gated_chunks import joined


def low_rank_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    read: Tensor,
    write: Tensor,
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
        query, key, read, write: `[B, H, T, K]`; log_decay: `[B, H, T, K]`; value: `[B, H, T, dv]`.
    The others, the result and the errors are those of [`decayed_scan`]. Segments of a text are computed again for
    their gradients.
    """
    log_decay = check_recurrence(query, key, value, log_decay, key_padding_mask, state, chunk_size)
    if not (key.shape == read.shape == write.shape == log_decay.shape):
        raise ValueError(
            f"read, write and log_decay must be [B, H, T, K] as key, {tuple(key.shape)}, got {tuple(read.shape)},"
            f" {tuple(write.shape)} and {tuple(log_decay.shape)}."
        )
    wide = accumulation_dtype(value.dtype)
    if key.shape[2] == 1:
        out, state = _step(query, key, value, read, write, log_decay, key_padding_mask, state)
        return (out, state) if return_state else out
    if key_padding_mask is not None:
        key, write = (x.masked_fill(~key_padding_mask[:, None, :, None], 0.0) for x in (key, write))
    log_decay = forgetting(log_decay, key_padding_mask, segment_ids)
    chunk = power_of_two(chunk_size, key.shape[2])
    after = value.new_zeros(*value.shape[:2], key.shape[3], value.shape[3], dtype=wide)
    after = (after if state is None else state.to(wide)).flatten(0, 1)
    parts, found = (query, key, value, read, write, log_decay), []
    width = max(key.shape[3], value.shape[3])
    if in_one_batch(value):
        width = numbers_at_once(chunk, width)
    bounds = segments(key.shape[2], value, chunk, width)
    with without_autocast(value):
        for start, stop in bounds:
            pieces = [x[:, :, start:stop] for x in parts]
            if torch.is_grad_enabled() and len(bounds) > 1:
                out, after = checkpoint(_segment, chunk, *pieces, after, use_reentrant=False)
            else:
                out, after = _segment(chunk, *pieces, after)
            found.append(out)
    out = torch.cat(found, dim=2) if len(found) > 1 else found[0]
    return (out, after.unflatten(0, value.shape[:2])) if return_state else out


def _segment(chunk: int, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, H, t, *] and the state before them [R, K, dv] -> their outputs [B, H, t, dv], and the state after."""
    query, key, value, read, write, log_decay, state = given
    (batch, heads, length, width), wide, rows = value.shape, state.dtype, state.shape[0]
    parts = (query, key, value, read, write, log_decay)
    q, k, v, r, w, logs = (to_chunks(x, 0, length, chunk, wide) for x in parts)  # [R N, C, *]
    decay = ChunkDecay(logs, wide, at_once=in_one_batch(value))
    system = decay.products(w, r)[0].tril(-1)
    sides = torch.cat((decay.products(k, r)[0].tril(-1) @ v, r * decay.from_start), dim=-1)
    unit = torch.eye(chunk, dtype=wide, device=value.device)
    solved = torch.linalg.solve_triangular(unit + system, sides, upper=False, unitriangular=True)
    own, held = solved.split((width, k.shape[-1]), dim=-1)  # U = own + held S
    writes = (w * decay.to_end).mT
    change = (k * decay.to_end).mT @ v - writes @ own
    maps = torch.diag_embed(decay.whole[..., 0]) - writes @ held
    change, maps = change.unflatten(0, (rows, -1)), maps.unflatten(0, (rows, -1))
    if in_one_batch(value):
        states = joined(maps.transpose(0, 1), torch.cat([state[None], change.transpose(0, 1)]))
        before, state = states[:-1].transpose(0, 1).flatten(0, 1), states[-1]
    else:
        befores = []
        for n in range(change.shape[1]):
            befores.append(state)
            state = torch.baddbmm(change[:, n], maps[:, n], state)
        before = torch.stack(befores, dim=1).flatten(0, 1)
    out = (q * decay.from_start) @ before + decay.products(k, q)[0] @ v
    out = out - decay.products(w, q)[0] @ (own + held @ before)
    return out.reshape(batch, heads, -1, width)[:, :, :length].to(value.dtype), state


def _step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One token, [B, H, 1, *]: what it reads, and the state after."""
    with without_autocast(value):
        q, k, v, left = for_step(query, key, value, log_decay, mask)
        if mask is not None:
            k, write = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, write))
        new = k.mT * v
        if state is not None:
            state = left * state.to(v.dtype)
            new = new + state - write.to(v.dtype).mT * (read.to(v.dtype) @ state)
        return (q @ new).to(value.dtype), new
