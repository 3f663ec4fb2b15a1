# SPDX-License-Identifier: Apache-2.0
"""The causal scan of linear attention for devices that want few and large operations: all chunks at once.

Numbers and meaning are those of `kernels.CausalScan`. A denominator is a numerator whose values are 1, so it comes as
a further column of the values, and its sums as one of the state; where rotated features stand in the numerator only,
the two are separate. States go from chunk to chunk by one product with the matrix of the factors between them.

Names as in `kernels`; `W` columns of values with what was added to them, `E = [initial state, sums of chunks 0..N-1]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.products import product
from ..common.segments import (
    accumulate,
    accumulation_dtype,
    active_params,
    keep_chunks,
    like_or_none,
    low_features,
    masked,
    operand_dtype,
    put_chunks,
    segments,
    to_chunks,
)
from .kernels import LOG_ZERO, chunk_weights, guard, inverse_or_zero, log_rows


class BatchedCausalScan(torch.autograd.Function):
    """As `kernels.CausalScan`, whose arguments it takes; `kv`, `z` and `scale` are None at the start of a text, and
    the state at the end is empty unless `remember`."""

    @staticmethod
    def forward(ctx, q, k, a, b, v, mask, log_weight, kv, z, scale, chunk, *others):
        eps, minimum, normalize, width, scaled, remember, map_q, map_k, *params = others
        batch, heads, length, _ = q.shape
        dtypes = dtype, low = accumulation_dtype(v.dtype), operand_dtype(v)
        chunk, columns, rows = min(chunk, length), v.shape[3], batch * heads
        call = _Call(a, b, v, mask, log_weight, chunk, low, normalize or remember, columns)
        out = torch.empty_like(v)
        bounds, saved = segments(length, v, chunk, width), []
        states, scale = call.packed(kv, z), None if scale is None else scale.view(-1)
        if scaled and scale is None:
            scale = torch.full((rows,), LOG_ZERO, dtype=dtype, device=v.device)
        with torch.autocast(q.device.type, enabled=False):
            for start, stop in bounds:
                before, inverse, acts = (states, scale), None, None
                qq, _, _ = low_features(map_q, params, q, start, stop, chunk, dtypes)
                kk, logs, _ = low_features(map_k, params, k, start, stop, chunk, dtypes)
                parts, weights, _ = call.parts(qq, kk, logs, scale, start, stop)
                scale, ends, found = weights.after, [], []
                for part, state in zip(parts, states):
                    end = remember or stop < length
                    scores, held, last = _join(part, weights, state, end)
                    read = product(part.x, held)
                    if weights.row is not None:
                        read *= weights.row
                    found.append(product(scores, part.y_values, into=read))
                    ends.append(last)
                states = ends
                numerator = found[0][..., :columns]
                if normalize:
                    den = guard(found[-1][..., columns if len(found) == 1 else 0, None], eps, minimum)
                    inverse, acts = inverse_or_zero(den), den.abs() <= minimum if minimum > 0 else None
                    numerator = numerator * inverse
                put_chunks(out, start, stop, numerator)
                saved += [*before[0], before[1], inverse, acts]
        ctx.save_for_backward(q, k, a, b, v, mask, log_weight, out if normalize else None, *saved, *params)
        ctx.options = bounds, chunk, low, normalize, remember, map_q, map_k, len(params), kv is not None
        ctx.set_materialize_grads(False)
        if not remember:
            ends = [v.new_empty(0) for _ in range(3)]
            ctx.mark_non_differentiable(*ends)
            return out, *ends
        kv, z = call.unpacked(states, batch, heads)
        scale = scale.view(batch, heads) if scaled else v.new_empty(0)
        ctx.mark_non_differentiable(scale)
        return out, kv, z, scale

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_out, grad_kv, grad_z, _):
        bounds, chunk, low, normalize, remember, map_q, map_k, count, given = ctx.options
        q, k, a, b, v, mask, log_weight, out, *saved = ctx.saved_tensors
        saved, params = (saved[:-count], saved[-count:]) if count else (saved, [])
        columns, heads, dtypes = v.shape[3], q.shape[:2], (accumulation_dtype(v.dtype), low)
        call = _Call(a, b, v, mask, log_weight, chunk, low, normalize or remember, columns)
        grads = [like_or_none(x) for x in (q, k, a, b, v, log_weight)]
        grad_q, grad_k, grad_a, grad_b, grad_v, grad_log = grads
        active, grad_params = active_params(params, ctx.needs_input_grad)
        grad_out = torch.zeros_like(v) if grad_out is None else grad_out
        if not remember:  # a compiler gives some for the empty tensors, too
            grad_kv = grad_z = None
        if (grad_kv is None) != (grad_z is None):
            grad_z = grad_kv.new_zeros(grad_kv.shape[:3]) if grad_z is None else grad_z
            grad_kv = grad_z.new_zeros(*grad_z.shape, columns) if grad_kv is None else grad_kv
        to_states = call.packed(grad_kv, grad_z)
        size = len(saved) // len(bounds)
        with torch.autocast(q.device.type, enabled=False):
            for index, (start, stop) in reversed(list(enumerate(bounds))):
                *states, scale, inverse, acts = saved[index * size : (index + 1) * size]
                qq, logs_q, pull_q = low_features(map_q, params, q, start, stop, chunk, dtypes, active)
                kk, logs, pull_k = low_features(map_k, params, k, start, stop, chunk, dtypes, active)
                parts, weights, keep = call.parts(qq, kk, logs, scale, start, stop)
                u, w = to_chunks(grad_out, start, stop, chunk, low), None
                if normalize:
                    u = u * inverse
                    w = (u * to_chunks(out, start, stop, chunk, low)).sum(-1, keepdim=True).neg_()
                    w = w if acts is None else w.masked_fill_(acts, 0.0)
                pulled = [
                    _pull(part, weights, state, above, to_state)
                    for part, state, above, to_state in zip(parts, states, call.gradients(u, w), to_states)
                ]
                to_states = [each[3] for each in pulled]
                to_x, to_y, to_v, _ = pulled[0]
                put_chunks(grad_v, start, stop, to_v[..., :columns])
                to_log = None
                if weights.row is not None:
                    # A weight multiplies its key, so its logarithm has the gradient of the key's length.
                    to_log = sum((part.y * each[1]).sum(-1, keepdim=True) for part, each in zip(parts, pulled))
                    put_chunks(grad_log, start, stop, to_log)
                if a is not None:
                    put_chunks(grad_a, start, stop, to_x)
                    put_chunks(grad_b, start, stop, masked(to_y, keep))
                    to_x, to_y = pulled[1][:2] if len(pulled) > 1 else (torch.zeros_like(to_x), torch.zeros_like(to_y))
                to_q, *to_params = pull_q(to_x, None if logs_q is None else torch.zeros_like(logs_q))
                accumulate(grad_params, to_params)
                to_k, *to_params = pull_k(masked(to_y, keep), None if logs is None else to_log)
                accumulate(grad_params, to_params)
                put_chunks(grad_q, start, stop, to_q)
                put_chunks(grad_k, start, stop, to_k)
        grad_kv, grad_z = call.unpacked(to_states, *heads) if given else (None, None)
        gradients = grad_q, grad_k, grad_a, grad_b, grad_v, None, grad_log, grad_kv, grad_z
        return *gradients, *[None] * 10, *grad_params


class _Part(NamedTuple):
    """One sum over keys: out_i = sum_j w_j (x_i . y_j) values_j."""

    x: Tensor  # [R N, C, F]
    y: Tensor
    y_values: Tensor  # [R N, C, W]


class _Weights(NamedTuple):
    """Factors from the weights of the keys; without weights these are None, and `carry` holds ones."""

    carry: (
        Tensor  # [R, N + 1, N + 1], what an element of E is multiplied with in the state before a chunk, or the last
    )
    decay: Tensor | None = None  # [R N, C, C], weight of key j relative to the running maximum of row i
    row: Tensor | None = None  # [R N, C, 1], what multiplies the state before the chunk in row i
    column: Tensor | None = None  # [R N, C, 1], what multiplies key j in the state after the chunk
    after: Tensor | None = None  # [R], the scale of the last state


class _Call(NamedTuple):
    """What all segments of a call share."""

    a: Tensor | None
    b: Tensor | None
    v: Tensor
    mask: Tensor | None
    log_weight: Tensor | None
    chunk: int
    low: torch.dtype
    counts: bool  # whether the sums of keys alone are made as well
    columns: int  # of the values, dv

    @property
    def extra(self) -> int:
        """Columns besides the values: the first holds ones, and their number makes products aligned."""
        return 8 - self.columns % 8 if self.counts else 0

    @property
    def sums(self) -> int:
        return 2 if self.counts and self.a is not None else 1

    def units(self, like: Tensor) -> Tensor:
        """Ones and zeros in the further columns of `like [n, t, *]`."""
        return torch.eye(1, self.extra, dtype=like.dtype, device=like.device).expand(*like.shape[:2], -1)

    def packed(self, kv: Tensor | None, z: Tensor | None) -> list[Tensor | None]:
        """Sums over values `[B, H, F, dv]` and over keys `[B, H, F]` as states `[R, F, W]` of the parts."""
        if kv is None or z is None:
            return [None] * self.sums
        if not self.counts:
            return [kv.flatten(0, 1)]
        z = torch.nn.functional.pad(z.flatten(0, 1)[..., None], (0, self.extra - 1))
        return [kv.flatten(0, 1), z] if self.sums == 2 else [torch.cat([kv.flatten(0, 1), z], dim=-1)]

    def unpacked(self, states: list[Tensor], batch: int, heads: int) -> tuple[Tensor, Tensor | None]:
        kv, last = states[0][..., : self.columns], states[-1]
        z = last[..., self.columns if self.sums == 1 else 0] if self.counts else None
        return kv.unflatten(0, (batch, heads)).contiguous(), (
            None if z is None else z.unflatten(0, (batch, heads)).contiguous()
        )

    def gradients(self, u: Tensor, w: Tensor | None) -> list[Tensor]:
        """Those of what the parts read, from those of numerators `u` and denominators `w`."""
        if not self.counts:
            return [u.to(self.low)]
        shape = (*u.shape[:2], self.extra)
        tail = [u.new_zeros(shape)] if w is None else [w, w.new_zeros(1).expand(*w.shape[:2], self.extra - 1)]
        parts = [[u], tail] if self.sums == 2 else [[u, *tail]]
        return [(torch.cat(each, dim=-1) if len(each) > 1 else each[0]).to(self.low) for each in parts]

    def parts(self, q: Tensor, k: Tensor, logs: Tensor | None, scale: Tensor | None, start: int, stop: int):
        """The sums of one segment from the chunks of its features, the weights, and where keys are real."""
        keep = keep_chunks(self.mask, self.v, start, stop, self.chunk)
        k = masked(k, keep)
        values = to_chunks(self.v, start, stop, self.chunk, self.low)
        if self.a is None or self.b is None:
            values = torch.cat([values, self.units(values)], dim=-1) if self.counts else values
            parts = [_Part(q, k, values)]
        else:
            x = to_chunks(self.a, start, stop, self.chunk, self.low)
            y = masked(to_chunks(self.b, start, stop, self.chunk, self.low), keep)
            parts = [_Part(x, y, values), *([_Part(q, k, self.units(values).contiguous())] if self.counts else [])]
        rows = self.v.shape[0] * self.v.shape[1]
        count, dtype = k.shape[0] // rows, accumulation_dtype(self.v.dtype)
        if scale is None:
            ones = torch.ones(count + 1, count + 1, dtype=dtype, device=k.device).tril_()
            return parts, _Weights(ones.expand(rows, -1, -1)), keep
        wide = dtype if self.log_weight is None else torch.promote_types(dtype, self.log_weight.dtype)
        logs = log_rows(logs, self.log_weight, keep, start, stop, self.chunk, wide)
        logs = scale.new_zeros(k.shape[:2]) if logs is None else logs
        decay, row, column, scales = chunk_weights(logs.view(rows, count, self.chunk), scale, dtype)
        carry = (scales[:, None, :] - scales[:, :, None]).clamp_(max=0.0).exp_().tril_().to(dtype)
        return parts, _Weights(carry, decay, row, column, scales[:, -1].clone()), keep


def _join(part: _Part, weights: _Weights, initial: Tensor | None, end: bool):
    """Scores `[R N, C, C]` within chunks, states before them `[R N, F, W]` and, where it is asked for, the last
    `[R, F, W]`."""
    scores = torch.bmm(part.x, part.y.mT)
    scores = scores.tril_() if weights.decay is None else scores.mul_(weights.decay)
    values, rows = part.y_values, weights.carry.shape[0]
    if weights.column is not None:
        values = (values * weights.column).to(part.y.dtype)
    sums = product(part.y.mT, values)
    states = _carried(weights.carry, sums.view(rows, -1, sums[0].numel()), initial, end)
    last = states[:, -1].view(rows, *sums.shape[1:]).clone() if end else None
    held = states[:, :-1] if end else states
    return scores, held.to(part.x.dtype).reshape(sums.shape), last


def _carried(carry: Tensor, sums: Tensor, initial: Tensor | None, end: bool) -> Tensor:
    """All states `[R, N (+ 1), F W]`."""
    count = sums.shape[1]
    if initial is not None:
        sums = torch.cat([initial.reshape(-1, 1, sums.shape[2]), sums], dim=1)
    return torch.bmm(carry[:, : count + end, 1 - (initial is not None) :], sums)


def _pull(part: _Part, weights: _Weights, initial: Tensor | None, above: Tensor, to_last: Tensor | None):
    """Gradients of x, y, the values and the initial state from those of what was read and of the last state."""
    scores, held, _ = _join(part, weights, initial, False)
    rows, low = weights.carry.shape[0], part.x.dtype
    row_above = above if weights.row is None else (above * weights.row).to(low)
    pair = torch.bmm(above, part.y_values.mT)
    pair = pair.tril_() if weights.decay is None else pair.mul_(weights.decay)
    to_states = product(part.x.mT, row_above)
    shape, count = to_states.shape, to_states.shape[0] // rows
    to_states = to_states.view(rows, count, -1)
    if to_last is not None:
        to_states = torch.cat([to_states, to_last.reshape(rows, 1, -1)], dim=1)
    # States are a product of `carry` and E.
    first = 1 - (initial is not None)
    back = torch.bmm(weights.carry[:, : to_states.shape[1], first:].mT, to_states)
    to_initial = None
    if initial is not None:
        to_initial, back = back[:, 0].reshape(initial.shape), back[:, 1:]
    to_sums = back.to(low).reshape(shape)
    values, to_values = part.y_values, product(part.y, to_sums)
    if weights.column is not None:
        values, to_values = (values * weights.column).to(low), to_values.mul_(weights.column)
    product(scores.mT, above, into=to_values)
    to_x = product(pair, part.y, into=product(row_above, held.mT))
    to_y = product(pair.mT, part.x, into=product(values, to_sums.mT))
    return to_x, to_y, to_values, to_initial
