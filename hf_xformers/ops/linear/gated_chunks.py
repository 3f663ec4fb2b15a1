# SPDX-License-Identifier: Apache-2.0
"""A state that decays, and is added to or corrected, in chunks: what `decayed_scan` and `gated_delta` compute.

With D the decays between the tokens of a chunk, e^b those from its start to a token, e^c those from a token to its end
([`ChunkDecay`]), all per key channel or per token, and S the state before the chunk:

    (I + strictlower(diag(beta) K K^T D)) U = diag(beta) (V - (K e^b) S),      U = V where nothing is corrected,
    out = (Q e^b) S + lower(Q K^T D) U,        S <- e^{b_C} S + (K e^c)^T U.

Everything but U and S is made for all chunks of a segment at once. On a processor two products with the state lead
from chunk to chunk. Elsewhere a chunk is one map of the state, diag(e^{b_C}) - (K e^c)^T W, where W is what U reads of
S, and maps of neighbors are joined again and again, which takes log2(N) steps for all states.

Names: `X = B G` rows of key heads, `R = B H` of value heads, `N` chunks per segment, `C` tokens per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.products import product
from ..common.segments import accumulation_dtype, in_one_batch, operand_dtype, put_chunks, segments, to_chunks
from .batched_delta import unit_lower_inverse
from .chunk_decay import ChunkDecay, numbers_at_once
from .fla import recurrence_kernel


def scan_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor,
    state: Tensor | None,
    chunk: int,
    finite: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, dv] and the last state [B, H, K, dv].

    query, key [B, G, T, K] (G = H where decays are of channels), value [B, H, T, dv], beta [B, H, T] or None,
    log_decay [B, H, T] or [B, H, T, K], state [B, H, K, dv]; chunk: a power of two. finite: log decays are known to
    be, as kernels of others want them.
    """
    if finite and in_one_batch(value):
        corrects = beta is not None
        kernel = recurrence_kernel(key.shape[3], value, corrects, log_decay.dim() == 4, _outputs)
        if kernel is not None:
            strengths = (beta,) if corrects else ()
            return kernel(query, key, value, *strengths, log_decay, state=state)
    return _GatedScan.apply(query, key, value, beta, log_decay, state, chunk)


def _outputs(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
    """The outputs of a text from its beginning."""
    *beta, log_decay = others
    return _GatedScan.apply(query, key, value, beta[0] if beta else None, log_decay, None, 64)[0]


class _Part(NamedTuple):
    """What forward and backward need of one segment."""

    q: Tensor  # [X N, C, K]
    k: Tensor
    v: Tensor  # [R N, C, dv]
    beta: Tensor | None  # [R N, C, 1]
    decay: ChunkDecay
    reads: Tensor  # [R N, C, K], Q e^b
    adds: Tensor  # [R N, C, K], K e^c
    scores: Tensor  # [R N, C, C], lower(Q K^T D)
    gram: Tensor | None  # [R N, C, C], strictlower(K K^T D)
    inverse: Tensor | None  # [R N, C, C], of I + diag(beta) gram
    held: Tensor | None  # [R N, C, K], K e^b
    forgets: Tensor | None  # [R N, C, K], W = inverse diag(beta) held


class _GatedScan(torch.autograd.Function):
    """Keeps its inputs and, on a processor, the state before each segment; what is in between is computed again, since
    a state that has decayed cannot be taken back to what it was. Elsewhere it keeps the states before all chunks and
    what is written, as operands: as much as the values, and hundreds of kernels less."""

    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, state, chunk):
        wide, rows = accumulation_dtype(v.dtype), v.shape[0] * v.shape[1]
        width = max(k.shape[3], v.shape[3])
        if in_one_batch(v) and log_decay.dim() == 4:
            width = numbers_at_once(chunk, width)
        bounds = segments(v.shape[2], v, chunk, width)
        current = v.new_zeros(rows, k.shape[3], v.shape[3], dtype=wide)
        if state is not None:
            current = state.to(wide).flatten(0, 1)
        out, kept = torch.empty_like(v), []
        with torch.autocast(v.device.type, enabled=False):
            for start, stop in bounds:
                initial = current
                part = _prepare(q, k, v, beta, log_decay, start, stop, chunk)
                before, written, current = _run(part, initial)
                kept += [before, written] if in_one_batch(v) else [initial]
                found = product(part.reads, before)
                put_chunks(out, start, stop, product(part.scores.to(written.dtype), written, into=found))
        ctx.save_for_backward(q, k, v, beta, log_decay, *kept)
        ctx.options = bounds, chunk, None if state is None else state.dtype
        return out, current.unflatten(0, v.shape[:2]).clone()

    @staticmethod
    @first_derivative_only("A gated recurrence", LITERAL)
    def backward(ctx, grad_out, grad_state):
        q, k, v, beta, log_decay, *kept = ctx.saved_tensors
        bounds, chunk, state_dtype = ctx.options
        low = operand_dtype(v)
        grads = tuple(None if x is None else torch.empty_like(x) for x in (q, k, v, beta, log_decay))
        to_state = grad_state.flatten(0, 1)
        with torch.autocast(v.device.type, enabled=False):
            for start, stop in reversed(bounds):
                part = _prepare(q, k, v, beta, log_decay, start, stop, chunk)
                if in_one_batch(v):
                    written, before = kept.pop(), kept.pop()
                else:
                    before, written, _ = _run(part, kept.pop())
                grad = to_chunks(grad_out, start, stop, chunk, low)
                *found, to_state = _pull(part, before, written, grad, to_state)
                for target, gradient in zip(grads, found, strict=True):
                    put_chunks(target, start, stop, gradient)
        *others, to_log = grads
        to_log = to_log.masked_fill_(log_decay == -torch.inf, 0.0)  # where rounding alone is left of it
        to_state = None if state_dtype is None else to_state.unflatten(0, v.shape[:2]).to(state_dtype)
        return *others, to_log, to_state, None


def _prepare(q, k, v, beta, log_decay, start, stop, chunk) -> _Part:
    low, wide, shared = operand_dtype(v), accumulation_dtype(v.dtype), v.shape[1] // k.shape[1]
    q, k, v = (to_chunks(x, start, stop, chunk, low) for x in (q, k, v))
    logs = log_decay if log_decay.dim() == 4 else log_decay[..., None]
    logs = to_chunks(logs, start, stop, chunk, wide)
    logs, count = logs if log_decay.dim() == 4 else logs[..., 0], -((start - stop) // chunk)
    decay = ChunkDecay(logs, low, count, shared, in_one_batch(v))
    scores, *of_keys = decay.products(k, q) if beta is None else decay.products(k, q, k)
    reads, adds = decay.weighed(q, decay.from_start), decay.weighed(k, decay.to_end)
    if beta is None:
        return _Part(q, k, v, None, decay, reads, adds, scores, None, None, None, None)
    beta = to_chunks(beta[..., None], start, stop, chunk, wide)
    gram = of_keys[0].tril_(-1)
    inverse, held = unit_lower_inverse(beta * gram), decay.weighed(k, decay.from_start)
    forgets = product((inverse * beta.mT).to(low), held).to(low)
    return _Part(q, k, v, beta, decay, reads, adds, scores, gram, inverse, held, forgets)


def _run(part: _Part, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the state before a segment, [R, K, dv]: the states before its chunks [R N, K, dv] and what is written
    [R N, C, dv], both as operands, and the state after it."""
    low = part.v.dtype
    written = part.v
    if part.beta is not None and part.inverse is not None:
        written = product((part.inverse * part.beta.mT).to(low), part.v)
    befores, state, written = _states(part, written, state)
    before = befores.to(low).flatten(0, 1)
    return before, written.to(low), state


def _states(part: _Part, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states before all chunks [R, N, K, dv] and the one after them, and what is written, from what would be
    written into an empty state."""
    rows = state.shape[0]
    whole, wide = part.decay.whole.unflatten(0, (rows, -1)), written
    if in_one_batch(part.adds):
        change = product(part.adds.mT, written.to(part.adds.dtype)).unflatten(0, (rows, -1)).transpose(0, 1)
        maps = (whole if part.forgets is None else _maps(part, part.forgets).unflatten(0, (rows, -1))).transpose(0, 1)
        states = joined(maps, torch.cat([state[None], change]))
        before = states[:-1].transpose(0, 1)
        if part.forgets is not None:
            low = part.forgets.dtype
            wide = product(part.forgets, before.to(low).flatten(0, 1), into=written, alpha=-1.0)
        return before, states[-1], wide
    befores = []
    if part.forgets is None:
        change = product(part.adds.mT, written).unflatten(0, (rows, -1))
        for n in range(change.shape[1]):
            befores.append(state)
            state = torch.addcmul(change[:, n], whole[:, n], state)
        return torch.stack(befores, dim=1), state, written
    if torch.compiler.is_compiling():
        change = product(part.adds.mT, written.to(part.adds.dtype)).unflatten(0, (rows, -1))
        maps = _maps(part, part.forgets).unflatten(0, (rows, -1))
        for n in range(change.shape[1]):
            befores.append(state)
            state = torch.baddbmm(change[:, n], maps[:, n], state)
        before = torch.stack(befores, dim=1)
        low = part.forgets.dtype
        return before, state, product(part.forgets, before.to(low).flatten(0, 1), into=written, alpha=-1.0)
    forgets, adds, written = (x.unflatten(0, (rows, -1)) for x in (part.forgets, part.adds, written))
    for n in range(adds.shape[1]):
        befores.append(state)
        written[:, n].baddbmm_(forgets[:, n], state, alpha=-1.0)
        state = (whole[:, n] * state).baddbmm_(adds[:, n].mT, written[:, n])
    return torch.stack(befores, dim=1), state, written.flatten(0, 1)


def joined(maps: Tensor, states: Tensor, reverse: bool = False) -> Tensor:
    """[N + 1, R, K, dv], all states of `S_{n+1} = maps_n S_n + change_n`, from `states` that hold the first state and
    behind it the changes; with `reverse` those of `S_n = maps_n S_{n+1} + change_n`, from the changes and behind them
    the last state. maps [N, R, K, K], or factors [N, R, K or 1, 1].

    In step i each state takes over what the one 2^i before it holds, through the joined maps of the chunks between.
    """
    step = 1
    while step < len(states):
        sources, targets = (states[step:], states[:-step]) if reverse else (states[:-step], states[step:])
        if maps.shape[3] == 1:
            new = torch.addcmul(targets, maps, sources)
        else:
            flat = (x.flatten(0, 1) for x in (targets, maps, sources))
            new = torch.baddbmm(*flat).unflatten(0, targets.shape[:2])
        states = torch.cat([new, states[-step:]] if reverse else [states[:step], new])
        if 2 * step < len(states):
            first, second = (maps[step:], maps[:-step]) if reverse else (maps[:-step], maps[step:])
            if maps.shape[3] == 1:
                maps = first * second
            else:
                maps = torch.bmm(second.flatten(0, 1), first.flatten(0, 1)).unflatten(0, first.shape[:2])
        step *= 2
    return states


def _maps(part: _Part, forgets: Tensor) -> Tensor:
    """What a chunk makes of the state before it, apart from what it adds: [R N, K, K]."""
    change = product(part.adds.mT, forgets)
    whole = part.decay.whole
    return torch.diag_embed(whole[..., 0].expand(-1, change.shape[1])) - change


def _states_backward(part: _Part, to_before: Tensor, to_written: Tensor, to_state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the states after all chunks [R N, K, dv] and of the one before them, from that of the state after
    the last, of what is written and, by reading alone, of the states before."""
    rows, afters, forgets, low = to_state.shape[0], [], part.forgets, part.reads.dtype
    whole, maps = part.decay.whole.unflatten(0, (rows, -1)), None
    if forgets is not None and (in_one_batch(part.adds) or torch.compiler.is_compiling()):
        to_before = product(forgets.mT, to_written.to(low), into=to_before, alpha=-1.0)
        maps = _maps(part, forgets).unflatten(0, (rows, -1))
    to_before, to_written, adds = (x.unflatten(0, (rows, -1)) for x in (to_before, to_written, part.adds))
    if in_one_batch(part.adds):
        each = (whole if maps is None else maps.mT).transpose(0, 1)
        states = joined(each, torch.cat([to_before.transpose(0, 1), to_state[None]]), reverse=True)
        return states[1:].transpose(0, 1).flatten(0, 1), states[0]
    for n in reversed(range(adds.shape[1])):
        afters.append(to_state)
        if forgets is None:
            to_state = torch.addcmul(to_before[:, n], whole[:, n], to_state)
        elif maps is not None:
            to_state = torch.baddbmm(to_before[:, n], maps[:, n].mT, to_state)
        else:
            each = torch.baddbmm(to_written[:, n], adds[:, n], to_state)
            to_state = (whole[:, n] * to_state).add_(to_before[:, n])
            to_state = to_state.baddbmm_(forgets.unflatten(0, (rows, -1))[:, n].mT, each, alpha=-1.0)
    return torch.stack(afters[::-1], dim=1).flatten(0, 1), to_state


def _pull(part: _Part, before: Tensor, written: Tensor, grad: Tensor, to_state: Tensor):
    """Gradients of q, k, v, beta, log_decay and the state before a segment, from those of its outputs and the state
    after it. A number that counts for all decays up to its token is `suffix`, one for those behind it `prefix`."""
    decay, low, channels = part.decay, part.reads.dtype, part.decay.per_channel
    to_written = product(part.scores.to(low).mT, grad)
    after, to_state_before = _states_backward(part, product(part.reads.mT, grad), to_written, to_state)
    wide_after, after = after, after.to(low)
    to_written = product(part.adds, after, into=to_written)
    to_scores = product(grad, written.mT).tril_()
    to_q, to_k, suffix = decay.pull(to_scores, part.scores, part.q, part.k)
    to_reads, to_adds = product(grad, before.mT), product(written, after.mT)
    to_v, to_beta = to_written, None
    from_start = [(part.reads, to_reads)]
    if part.beta is not None and part.inverse is not None and part.gram is not None and part.held is not None:
        by_system = product(part.inverse.to(low).mT, to_written.to(low))  # the gradient of beta (V - K e^b S)
        to_v = part.beta * by_system
        taken = product(part.gram.to(low), written, into=product(part.held, before))  # V - it is what beta multiplies
        to_beta = (by_system * (part.v - taken)).sum(-1, keepdim=True)
        by_values = to_v.to(low)
        to_gram = product(by_values, written.mT).tril_(-1).neg_()
        first, second, more = decay.pull(to_gram, part.gram, part.k, part.k)
        to_k, suffix = to_k.add_(first).add_(second), suffix + more
        to_held = product(by_values, before.mT).neg_()
        from_start.append((part.held, to_held))
        to_k += decay.gathered(to_held * decay.from_start)
    for x, to_x in from_start:
        suffix = suffix + (x * to_x if channels else (x * to_x).sum(-1, keepdim=True))
    prefix = part.adds * to_adds
    whole = (before * wide_after).sum(-1).unsqueeze(1) * decay.whole.mT
    if not channels:
        prefix, whole = prefix.sum(-1, keepdim=True), whole.sum(-1, keepdim=True)
    to_log = suffix.flip(1).cumsum(1).flip(1) + (prefix.cumsum(1) - prefix) + whole
    to_q = to_q.add_(decay.gathered(to_reads * decay.from_start))
    to_k = to_k.add_(decay.gathered(to_adds * decay.to_end))
    return to_q, to_k, to_v, to_beta, to_log, to_state_before
