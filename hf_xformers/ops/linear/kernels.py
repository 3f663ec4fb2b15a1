# SPDX-License-Identifier: Apache-2.0
"""The three autograd functions behind linear attention: sum over keys, read by queries, causal scan.

Gradients are written out by hand so that the backward pass keeps nothing but the inputs, the output, the denominators
and one state per segment; features from a map, and everything quadratic or per chunk, are recomputed for one segment
at a time.

Names: `k, q` features in the denominator, `b, a` features in the numerator (rotated; None = the same), `R = B H` rows
of states, `N` chunks per segment, `C` tokens per chunk, `F` feature width, `dv` value width. Chunks are stacked as
`[R N, C, width]`.

What is no tensor comes as `*others`: torch.compile takes a call with as many arguments as `forward` has names, `ctx`
included, for one that leaves `ctx` out.
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
    features_of,
    keep_chunks,
    like_or_none,
    low_features,
    masked,
    operand_dtype,
    put_chunks,
    segments,
    to_chunks,
)

# Stands for log(0) in running maxima: the difference of two such values is 0, never NaN.
LOG_ZERO = -1e30


class Write(torch.autograd.Function):
    """kv = sum_j e^{s_j - m} b_j^T v_j, z = sum_j e^{s_j - m} k_j, m = max_j s_j, for log weights s (None: all 0)."""

    @staticmethod
    def forward(ctx, k, b, v, mask, log_weight, *others):
        width, scaled, feature_map, *params = others
        dtypes = dtype, low = accumulation_dtype(v.dtype), operand_dtype(v)
        batch, heads, length, _ = k.shape
        kv = z = scale = None
        bounds = segments(length, v, width=width)
        with torch.autocast(k.device.type, enabled=False):
            for start, stop in bounds:
                keep = keep_chunks(mask, v, start, stop, stop - start)
                phi, logs, _ = low_features(feature_map, params, k, start, stop, stop - start, dtypes)
                kk, logs = masked(phi, keep), log_rows(logs, log_weight, keep, start, stop, stop - start, dtype)
                bb = kk if b is None else masked(to_chunks(b, start, stop, stop - start, low), keep)
                vv = to_chunks(v, start, stop, stop - start, low)
                weight = None
                if scaled:
                    maximum = logs.amax(1, keepdim=True)
                    maximum = maximum if scale is None else torch.maximum(scale, maximum)
                    weight = (logs - maximum).exp()
                    if scale is not None:
                        old = (scale - maximum).exp()
                        kv, z = kv.mul_(old), z.mul_(old)
                    scale, vv = maximum, (vv * weight).to(low)
                added = kk.sum(1, True, dtype=dtype) if weight is None else product(weight.mT.to(low), kk)
                z = added if z is None else z.add_(added)
                kv = product(bb.mT, vv, into=kv)
        if kv is None:  # no token at all
            kv = torch.zeros(batch * heads, width, v.shape[3], dtype=dtype, device=k.device)
            z, scale = kv.new_zeros(batch * heads, 1, width), kv.new_full((batch * heads, 1, 1), LOG_ZERO)
        scale = scale.view(batch, heads) if scaled else z.new_zeros(0)
        ctx.save_for_backward(k, b, v, mask, log_weight, scale, *params)
        ctx.options = bounds, scaled, feature_map, dtypes
        ctx.mark_non_differentiable(scale)
        return kv.view(batch, heads, width, -1), z.view(batch, heads, width), scale

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_kv, grad_z, _):
        k, b, v, mask, log_weight, scale, *params = ctx.saved_tensors
        bounds, scaled, feature_map, dtypes = ctx.options
        dtype, low = dtypes
        grad_k, grad_b, grad_v, grad_log = like_or_none(k), like_or_none(b), like_or_none(v), like_or_none(log_weight)
        active, grad_params = active_params(params, ctx.needs_input_grad)
        with torch.autocast(k.device.type, enabled=False):
            grad_kv = grad_kv.flatten(0, 1).to(low)
            grad_z = grad_z.flatten(0, 1)[:, None]
            for start, stop in bounds:
                keep = keep_chunks(mask, v, start, stop, stop - start)
                phi, logs, pull = low_features(feature_map, params, k, start, stop, stop - start, dtypes, active)
                from_map = logs is not None
                kk, logs = masked(phi, keep), log_rows(logs, log_weight, keep, start, stop, stop - start, dtype)
                bb = kk if b is None else masked(to_chunks(b, start, stop, stop - start, low), keep)
                vv = to_chunks(v, start, stop, stop - start, low)
                to_v, to_log = product(bb, grad_kv), None
                to_k = grad_z.expand_as(kk)
                if scaled:
                    weight = (logs - scale.view(-1, 1, 1)).exp()
                    to_v, vv, to_k = to_v * weight, (vv * weight).to(low), to_k * weight
                to_b = product(vv, grad_kv.mT)
                if b is None:
                    to_k = to_b = to_b + to_k
                # A weight multiplies its key, so its logarithm has the gradient of the key's length.
                if scaled:
                    to_log = (kk * to_k).sum(-1, keepdim=True)
                    to_log = to_log if b is None else to_log + (bb * to_b).sum(-1, keepdim=True)
                    put_chunks(grad_log, start, stop, to_log)
                to_k, *to_params = pull(masked(to_k, keep), to_log if from_map else None)
                for target, gradient in ((grad_k, to_k), (grad_b, masked(to_b, keep)), (grad_v, to_v)):
                    put_chunks(target, start, stop, gradient)
                accumulate(grad_params, to_params)
        return grad_k, grad_b, grad_v, None, grad_log, None, None, None, *grad_params


class Read(torch.autograd.Function):
    """out_i = (a_i kv) / (q_i . z)."""

    @staticmethod
    def forward(ctx, q, a, kv, z, dtype, *others):
        eps, minimum, normalize, feature_map, *params = others
        batch, heads, length, _ = q.shape
        # Heads side by side, as an output projection reads them: what it keeps is this very memory.
        out = torch.empty(batch, length, heads, kv.shape[3], dtype=dtype, device=q.device).transpose(1, 2)
        denominator = torch.empty(batch, heads, length if normalize else 0, dtype=kv.dtype, device=q.device)
        bounds = segments(length, q, width=kv.shape[2])
        dtypes = _, low = kv.dtype, operand_dtype(out)
        with torch.autocast(q.device.type, enabled=False):
            kv_rows, z_rows = (x.to(low) for x in (kv.reshape(-1, *kv.shape[2:]), z.reshape(-1, z.shape[2], 1)))
            for start, stop in bounds:
                qq, _, _ = low_features(feature_map, params, q, start, stop, stop - start, dtypes)
                aa = qq if a is None else to_chunks(a, start, stop, stop - start, low)
                numerator = product(aa, kv_rows)
                if normalize:
                    den = guard(product(qq, z_rows), eps, minimum)
                    numerator *= inverse_or_zero(den)
                    put_chunks(denominator, start, stop, den)
                put_chunks(out, start, stop, numerator)
        ctx.save_for_backward(q, a, kv, z, out if normalize else None, denominator, *params)
        ctx.options = bounds, minimum, normalize, feature_map, dtypes
        return out

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_out):
        q, a, kv, z, out, denominator, *params = ctx.saved_tensors
        bounds, minimum, normalize, feature_map, dtypes = ctx.options
        wide, low = dtypes
        grad_q, grad_a = like_or_none(q), like_or_none(a)
        active, grad_params = active_params(params, ctx.needs_input_grad)
        with torch.autocast(q.device.type, enabled=False):
            kv_rows, z_rows = kv.reshape(-1, *kv.shape[2:]), z.reshape(-1, 1, z.shape[2])
            grad_kv, grad_z = torch.zeros_like(kv_rows), torch.zeros_like(z_rows)
            kv_rows, z_rows = kv_rows.to(low), z_rows.to(low)
            for start, stop in bounds:
                chunk = stop - start
                qq, logs, pull = low_features(feature_map, params, q, start, stop, chunk, dtypes, active)
                aa = qq if a is None else to_chunks(a, start, stop, chunk, low)
                u = to_chunks(grad_out, start, stop, chunk, wide)
                if normalize:
                    den = to_chunks(denominator[..., None], start, stop, chunk, wide)
                    u, w = output_gradient(u, to_chunks(out, start, stop, chunk, wide), den, minimum)
                    w = w.to(low)
                    product(w.mT, qq, into=grad_z)
                u = u.to(low)
                product(aa.mT, u, into=grad_kv)
                to_q = to_a = product(u, kv_rows.mT)
                if a is not None:
                    put_chunks(grad_a, start, stop, to_a)
                    to_q = torch.zeros_like(to_a)
                if normalize:
                    to_q = product(w, z_rows, into=to_q)
                to_q, *to_params = pull(to_q, None if logs is None else torch.zeros_like(logs))
                put_chunks(grad_q, start, stop, to_q)
                accumulate(grad_params, to_params)
        return grad_q, grad_a, grad_kv.view_as(kv), grad_z.view_as(z), *[None] * 5, *grad_params


class CausalScan(torch.autograd.Function):
    """out_i = (a_i kv0 + sum_{j<=i} w_j (a_i . b_j) v_j) / (q_i z0 + sum_{j<=i} w_j (q_i . k_j)); the final sums."""

    @staticmethod
    def forward(ctx, q, k, a, b, v, mask, log_weight, kv, z, scale, chunk, *others):
        eps, minimum, normalize, map_q, map_k, *params = others
        batch, heads, length, _ = q.shape
        dtype = kv.dtype
        chunk = min(chunk, length)
        out = torch.empty_like(v)
        denominator = torch.empty(batch, heads, length if normalize else 0, dtype=dtype, device=q.device)
        state = kv.reshape(-1, *kv.shape[2:]), z.reshape(-1, 1, z.shape[2]), None if scale is None else scale.view(-1)
        saved, bounds = [], segments(length, v, chunk, kv.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            for start, stop in bounds:
                saved.append(state)
                qq, _, _ = features_of(map_q, params, to_chunks(q, start, stop, chunk, dtype), q.shape[:2])
                kk, logs, _ = features_of(map_k, params, to_chunks(k, start, stop, chunk, dtype), q.shape[:2])
                part, state = _segment(qq, kk, logs, a, b, v, mask, log_weight, state, start, stop, chunk)
                numerator = torch.bmm(part.a, part.kv)
                if part.row is not None:
                    numerator *= part.row
                numerator.baddbmm_(part.scores, part.v)
                if normalize:
                    own = part.scores if a is None else _scores(part.q, part.k, part.decay)
                    past = torch.bmm(part.q, part.z.mT)
                    den = own.sum(-1, keepdim=True) + (past if part.row is None else past * part.row)
                    den = guard(den, eps, minimum)
                    numerator *= inverse_or_zero(den)
                    put_chunks(denominator, start, stop, den)
                put_chunks(out, start, stop, numerator)
        states = [None if x[0] is None else torch.stack(x) for x in zip(*saved)]
        used = out if normalize else None
        ctx.save_for_backward(q, k, a, b, v, mask, log_weight, used, denominator, *states, *params)
        ctx.options = bounds, chunk, minimum, normalize, map_q, map_k
        scale = z.new_zeros(0) if scale is None else state[2].view(batch, heads)
        ctx.mark_non_differentiable(scale)
        return out, state[0].view_as(kv), state[1].view_as(z), scale

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_out, grad_kv, grad_z, _):
        q, k, a, b, v, mask, log_weight, out, denominator, kvs, zs, scales, *params = ctx.saved_tensors
        bounds, chunk, minimum, normalize, map_q, map_k = ctx.options
        dtype = kvs.dtype
        grad_q, grad_k, grad_a, grad_b, grad_v, grad_log = [like_or_none(x) for x in (q, k, a, b, v, log_weight)]
        active, grad_params = active_params(params, ctx.needs_input_grad)
        shape_kv, shape_z = grad_kv.shape, grad_z.shape
        grad_kv, grad_z = grad_kv.reshape(kvs.shape[1:]), grad_z.reshape(zs.shape[1:])
        with torch.autocast(q.device.type, enabled=False):
            for index, (start, stop) in reversed(list(enumerate(bounds))):
                state = kvs[index], zs[index], None if scales is None else scales[index]
                piece_q, piece_k = to_chunks(q, start, stop, chunk, dtype), to_chunks(k, start, stop, chunk, dtype)
                qq, logs_q, pull_q = features_of(map_q, params, piece_q, q.shape[:2], active)
                kk, logs, pull_k = features_of(map_k, params, piece_k, q.shape[:2], active)
                part, _ = _segment(qq, kk, logs, a, b, v, mask, log_weight, state, start, stop, chunk)
                u, w = to_chunks(grad_out, start, stop, chunk, dtype), None
                if normalize:
                    den = to_chunks(denominator[..., None], start, stop, chunk, dtype)
                    u, w = output_gradient(u, to_chunks(out, start, stop, chunk, dtype), den, minimum)
                to, grad_kv, grad_z = _segment_backward(part, u, w, a is not None, grad_kv, grad_z)
                to_log = None
                if part.row is not None:
                    # A weight multiplies its key, so its logarithm has the gradient of the key's length.
                    to_log = (part.k * to["k"]).sum(-1, keepdim=True)
                    if b is not None:
                        to_log += (part.b * to["b"]).sum(-1, keepdim=True)
                    put_chunks(grad_log, start, stop, to_log)
                to_q, *to_params = pull_q(to["q"], None if logs_q is None else torch.zeros_like(logs_q))
                accumulate(grad_params, to_params)
                to_k, *to_params = pull_k(masked(to["k"], part.keep), None if logs is None else to_log)
                accumulate(grad_params, to_params)
                pairs = (grad_q, to_q), (grad_k, to_k), (grad_a, to["a"]), (grad_v, to["v"])
                for target, gradient in (*pairs, (grad_b, masked(to["b"], part.keep))):
                    put_chunks(target, start, stop, gradient)
                # Or they would live on while the next segment is computed.
                del part, to, qq, kk, pull_q, pull_k, to_q, to_k, pairs, target, gradient
        grad_kv, grad_z = grad_kv.reshape(shape_kv), grad_z.reshape(shape_z)
        gradients = grad_q, grad_k, grad_a, grad_b, grad_v, None, grad_log, grad_kv, grad_z
        return *gradients, *[None] * 7, *grad_params


class _Segment(NamedTuple):
    """What forward and backward of the causal scan both need of one segment."""

    q: Tensor  # [R N, C, F]
    a: Tensor
    k: Tensor
    b: Tensor
    v: Tensor  # [R N, C, dv]
    keep: Tensor | None  # [R N, C, 1], False where a key is padding
    scores: Tensor  # [R N, C, C], a_i . b_j times decay, 0 for j > i
    decay: Tensor | None  # [R N, C, C], weight of key j relative to the running maximum of row i; None: no weights
    row: Tensor | None  # [R N, C, 1], what multiplies the state before the chunk in row i
    column: Tensor | None  # [R N, C, 1], what multiplies key j in the state after the chunk
    carry: tuple[Tensor, Tensor, Tensor]  # see _recur
    kv: Tensor  # [R N, F, dv], state before each chunk
    z: Tensor  # [R N, 1, F]


def _segment(q, k, logs, a, b, v, mask, log_weight, state, start, stop, chunk):
    """One segment of the causal scan from the chunks of its features, and the state after it."""
    kv, z, scale = state
    rows, dtype = kv.shape[0], kv.dtype
    count = k.shape[0] // rows
    keep = keep_chunks(mask, v, start, stop, chunk)
    a = q if a is None else to_chunks(a, start, stop, chunk, dtype)
    k = masked(k, keep)
    b = k if b is None else masked(to_chunks(b, start, stop, chunk, dtype), keep)
    v = to_chunks(v, start, stop, chunk, dtype)
    decay = row = column = None
    if scale is None:
        one = kv.new_ones(1, 1, 1)
        carry = kv.new_ones(count, count).tril_(-1).expand(rows, -1, -1), one, one
        sums, z_sums = torch.bmm(b.mT, v), k.sum(1)
    else:
        wide = dtype if log_weight is None else torch.promote_types(dtype, log_weight.dtype)
        logs = log_rows(logs, log_weight, keep, start, stop, chunk, wide)
        decay, row, column, scales = chunk_weights(logs.view(rows, count, chunk), scale, dtype)
        carry = _carry(scales, dtype)
        # The last scale lives on in the state: alone, not as a view that keeps all of them.
        scale = scales[:, -1].clone(memory_format=torch.contiguous_format)
        sums, z_sums = torch.bmm(b.mT, v * column), torch.bmm(column.mT, k)
    scores = _scores(a, b, decay)
    before, kv_end = _recur(sums.view(rows, count, -1), kv.view(rows, 1, -1), *carry)
    z_before, z_end = _recur(z_sums.view(rows, count, -1), z, *carry)
    before, z_before = before.view(-1, *kv.shape[1:]), z_before.view(-1, 1, z.shape[2])
    part = _Segment(q, a, k, b, v, keep, scores, decay, row, column, carry, before, z_before)
    return part, (kv_end.view_as(kv), z_end, scale)


def _segment_backward(part: _Segment, u, w, rotated: bool, grad_kv, grad_z):
    """Gradients of a segment from those of its numerators `u [R N, C, dv]`, denominators `w [R N, C, 1]` (None without
    normalization) and of the state after it. Those named q and k are complete when the features are not rotated."""
    rows = part.carry[0].shape[0]
    count = part.k.shape[0] // rows
    row_u = u if part.row is None else u * part.row
    row_w = w if part.row is None or w is None else w * part.row
    pair = torch.bmm(u, part.v.mT)
    if w is not None and not rotated:
        pair += w
    pair = pair.tril_() if part.decay is None else pair.mul_(part.decay)

    # Gradients flow back through the same linear recurrence of states, transposed.
    carry, first, last = part.carry
    back = carry.mT, last, first
    by_kv = torch.bmm(part.a.mT, row_u).view(rows, count, -1)
    by_z = part.z.new_zeros(rows, count, part.z.shape[2])
    if w is not None:
        by_z = torch.bmm(row_w.mT, part.q).view(rows, count, -1)
    shape = grad_kv.shape
    to_sums, grad_kv = _recur(by_kv, grad_kv.reshape(rows, 1, -1), *back, reverse=True)
    to_z_sums, grad_z = _recur(by_z, grad_z, *back, reverse=True)
    to_sums, to_z_sums = to_sums.view(part.kv.shape), to_z_sums.view(part.z.shape)

    weighted_v, to_v = part.v, torch.bmm(part.b, to_sums)
    if part.column is not None:
        weighted_v, to_v = part.v * part.column, to_v.mul_(part.column)
    to_v.baddbmm_(part.scores.mT, u)
    to_a = torch.bmm(row_u, part.kv.mT).baddbmm_(pair, part.b)
    to_b = torch.bmm(weighted_v, to_sums.mT).baddbmm_(pair.mT, part.a)
    to_q, to_k = (torch.zeros_like(part.q), torch.zeros_like(part.k)) if rotated else (to_a, to_b)
    if part.column is None:
        to_k += to_z_sums
    else:
        to_k.baddbmm_(part.column, to_z_sums)
    if w is not None:
        to_q.baddbmm_(row_w, part.z)
        if rotated:
            own = w.expand_as(pair)
            own = own.tril() if part.decay is None else own * part.decay
            to_q.baddbmm_(own, part.k)
            to_k.baddbmm_(own.mT, part.q)
    return dict(q=to_q, k=to_k, a=to_a, b=to_b, v=to_v), grad_kv.view(shape), grad_z


def _recur(items: Tensor, initial: Tensor, carry: Tensor, first: Tensor, last: Tensor, reverse: bool = False):
    """States `s_n` before each item of the recurrence `s_{n+1} = c_n s_n + items_n` (over n downwards if `reverse`).

    `items [R, N, W]` is overwritten; `initial [R, 1, W]`; `carry [R, N, N]` holds the products of factors from item to
    state, `first` and `last` the factors of the first and last item. Returns the states `[R, N, W]` and the end
    `[R, 1, W]`.
    """
    head, tail = (slice(-1, None), slice(0, 1)) if reverse else (slice(0, 1), slice(-1, None))
    items[:, head] += first * initial
    if items.shape[1] == 1:
        return initial, items
    states = torch.bmm(carry, items)
    states[:, head] = initial
    return states, items[:, tail] + last * states[:, tail]


def _carry(scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What `_recur` takes, from the scales `[R, N + 1]` before and after each chunk."""
    before, after = scales[:, :-1], scales[:, 1:]
    carry = (after[:, None, :] - before[:, :, None]).clamp_(max=0.0).exp_().tril_(-1).to(dtype)
    factors = (before - after).exp()[..., None].to(dtype)
    return carry, factors[:, :1], factors[:, -1:]


def chunk_weights(logs: Tensor, scale: Tensor, dtype: torch.dtype):
    """Factors of the weighted scan, all at most 1, from log weights `[R, N, C]` and the scale `[R]` of the state:
    decay, row and column (see `_Segment`), and the scales `[R, N + 1]` before and after chunks.

    The reference of row `i` is the running maximum up to `i` (it cancels in the ratio): no row depends on later keys.
    Factors are in `dtype`; the logarithms may be wider, as sums over a long text have to be, and are compared with the
    one after their chunk before they are rounded.
    """
    chunk = logs.shape[2]
    scales = torch.cat([scale[:, None], logs.amax(-1)], dim=1).cummax(dim=1).values  # before and after each chunk
    before, after = scales[:, :-1], scales[:, 1:]
    reference = torch.maximum(logs.cummax(dim=-1).values, before[..., None])
    row, column = (before[..., None] - reference).exp().to(dtype), (logs - after[..., None]).exp().to(dtype)
    if logs.dtype != dtype:
        logs, reference = ((x - after[..., None]).to(dtype) for x in (logs, reference))
    # Above the diagonal the exponent may be positive: clamp before exp, cut off after.
    decay = (logs[:, :, None, :] - reference[..., None]).clamp_(max=0.0).exp_().tril_()
    decay, row, column = decay.view(-1, chunk, chunk), row.view(-1, chunk, 1), column.view(-1, chunk, 1)
    return decay, row, column, scales


def _scores(rows: Tensor, columns: Tensor, decay: Tensor | None) -> Tensor:
    scores = torch.bmm(rows, columns.mT)
    return scores.tril_() if decay is None else scores.mul_(decay)


def log_rows(logs, log_weight, keep, start, stop, chunk, dtype) -> Tensor | None:
    """Log weights `[R N, C, 1]` of a segment, from the map or from `[B, H, T]`; -inf becomes finite, padding too."""
    if logs is None:
        if log_weight is None:
            return None
        logs = to_chunks(log_weight[..., None], start, stop, chunk, dtype)
    logs = logs.clamp(min=LOG_ZERO)
    return logs if keep is None else logs.masked_fill(~keep, LOG_ZERO)


def vanishes(denominator: Tensor) -> Tensor:
    """Where a denominator is so close to 0 that its query counts as one that sees no key: products near the smallest
    numbers lose their digits, and the inverse of their sum overflows, if not by itself then in a sum of its products
    with gradients."""
    limits = torch.finfo(denominator.dtype)
    return denominator.abs() < limits.tiny / limits.eps**2


def inverse_or_zero(denominator: Tensor) -> Tensor:
    """1 / denominator, and 0 for a query that sees no key ([`vanishes`])."""
    empty = vanishes(denominator)
    return torch.where(empty, 0.0, torch.where(empty, 1.0, denominator).reciprocal())


def guard(denominator: Tensor, eps: float, minimum: float) -> Tensor:
    """The denominator plus `eps`, and not smaller than `minimum` in magnitude."""
    denominator = denominator + eps if eps else denominator
    if minimum > 0:
        floor = torch.full_like(denominator, minimum)  # of its type: two numbers would make one of float32
        floor = torch.where(denominator < 0, -floor, floor)
        denominator = torch.where(denominator.abs() < minimum, floor, denominator)
    return denominator


def output_gradient(grad: Tensor, out: Tensor, denominator: Tensor, minimum: float) -> tuple[Tensor, Tensor]:
    """Gradients of numerator `[..., dv]` and denominator `[..., 1]`; the latter 0 where the guard acts."""
    inverse = inverse_or_zero(denominator)
    to_denominator = -(grad * out).sum(-1, keepdim=True) * inverse
    if minimum > 0:
        to_denominator = torch.where(denominator.abs() <= minimum, 0.0, to_denominator)
    return grad * inverse, to_denominator
