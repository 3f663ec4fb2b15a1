# SPDX-License-Identifier: Apache-2.0
"""Bidirectional linear attention over all pairs of a short text.

Sums of `F x dv` numbers for every head are more work than `T x S` products while a text is shorter than features are
wide: a sentence of 30 tokens has 900 pairs, the sums of 256 features and 64 values are 16,384 numbers.

Names as in the scans: `k, q` features in the denominator, `b, a` features in the numerator (None = the same),
`R = B H` rows, `F` feature width, `dv` value width.
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
    to_chunks,
)
from .kernels import guard, inverse_or_zero, log_rows, output_gradient


def pairs_are_fewer(queries: int, keys: int, features: int, values: int) -> bool:
    """Whether products of all pairs cost less than sums over keys. Never for a graph that serves several lengths: it
    would hold on one side of the limit only."""
    if torch.compiler.is_compiling():
        return False
    return max(queries, keys) * (features + values) < 2 * features * values


class Pairs(torch.autograd.Function):
    """out_i = sum_j w_j (a_i . b_j) v_j / sum_j w_j (q_i . k_j). Features are made again in the backward pass."""

    @staticmethod
    def forward(ctx, q, k, a, b, v, mask, log_weight, *others):
        eps, minimum, normalize, map_q, map_k, *params = others
        batch, heads, length, _ = q.shape
        # Heads side by side, as an output projection reads them: what it keeps is this very memory.
        out = torch.empty(batch, length, heads, v.shape[3], dtype=v.dtype, device=v.device).transpose(1, 2)
        denominator = None
        with torch.autocast(q.device.type, enabled=False):
            part, _, _ = _evaluate(q, k, a, b, v, mask, log_weight, map_q, map_k, params)
            scores = torch.bmm(part.a, part.b.mT)
            found = product(scores, part.v)
            if normalize:
                own = scores if a is None else torch.bmm(part.q, part.k.mT)
                weight = part.weight
                total = own.sum(-1, True, dtype=found.dtype) if weight is None else product(own, weight.to(own.dtype))
                denominator = guard(total, eps, minimum)
                found *= inverse_or_zero(denominator)
            put_chunks(out, 0, length, found)
        ctx.save_for_backward(q, k, a, b, v, mask, log_weight, out if normalize else None, denominator, *params)
        ctx.options = minimum, normalize, map_q, map_k
        return out

    @staticmethod
    @first_derivative_only("Linear attention", LITERAL)
    def backward(ctx, grad_out):
        q, k, a, b, v, mask, log_weight, out, denominator, *params = ctx.saved_tensors
        minimum, normalize, map_q, map_k = ctx.options
        active, grad_params = active_params(params, ctx.needs_input_grad)
        grad_q, grad_k, grad_a, grad_b, grad_v, grad_log = [like_or_none(x) for x in (q, k, a, b, v, log_weight)]
        with torch.autocast(q.device.type, enabled=False):
            inputs = q, k, a, b, v, mask, log_weight, map_q, map_k, params, active
            part, (logs_q, pull_q), (logs_k, pull_k) = _evaluate(*inputs)
            u = _rows(grad_out, accumulation_dtype(v.dtype))
            to_own = None  # gradient of the products q_i . k_j in the denominator
            if normalize:
                u, w = output_gradient(u, _rows(out, u.dtype), denominator, minimum)
                to_own = (w if part.weight is None else w * part.weight.mT).expand(-1, -1, k.shape[2])
            u = u.to(part.v.dtype)
            to_scores = torch.bmm(u, part.v.mT)
            if a is None and to_own is not None:
                to_scores += to_own
            to_v = product(torch.bmm(part.a, part.b.mT).mT, u)
            to_q = to_a = product(to_scores, part.b)
            to_k = to_b = product(to_scores.mT, part.a)
            if a is not None:
                own = torch.zeros_like(to_scores) if to_own is None else to_own.to(to_scores.dtype)
                to_q, to_k = product(own, part.k), product(own.mT, part.q)
            to_log = None
            if part.weight is not None:
                to_v *= part.weight
                # A weight multiplies its key, so its logarithm has the gradient of the key's length.
                to_log = (part.k * to_k).sum(-1, keepdim=True)
                if b is not None:
                    to_log += (part.b * to_b).sum(-1, keepdim=True)
                put_chunks(grad_log, 0, k.shape[2], to_log)
            to_q, *to_params = pull_q(to_q, None if logs_q is None else torch.zeros_like(logs_q))
            accumulate(grad_params, to_params)
            to_k, *to_params = pull_k(masked(to_k, part.keep), None if logs_k is None else to_log)
            accumulate(grad_params, to_params)
            for target, gradient in (grad_q, to_q), (grad_k, to_k), (grad_v, to_v):
                put_chunks(target, 0, gradient.shape[1], gradient)
            if b is not None:
                put_chunks(grad_a, 0, q.shape[2], to_a)
                put_chunks(grad_b, 0, k.shape[2], masked(to_b, part.keep))
        return grad_q, grad_k, grad_a, grad_b, grad_v, None, grad_log, *[None] * 5, *grad_params


class _Part(NamedTuple):
    """What forward and backward both need. Keys that are padding have weight 0 or, without weights, features 0."""

    q: Tensor  # [R, T, F]
    a: Tensor
    k: Tensor  # [R, S, F]
    b: Tensor
    v: Tensor  # [R, S, dv], times the weight
    weight: Tensor | None  # [R, S, 1], relative to the largest of the text; None: all 1
    keep: Tensor | None  # [R, S, 1], False where a key is padding


def _evaluate(q, k, a, b, v, mask, log_weight, map_q, map_k, params, active=None):
    dtypes = dtype, low = accumulation_dtype(v.dtype), operand_dtype(v)
    length, keep = k.shape[2], keep_chunks(mask, v, 0, k.shape[2], k.shape[2])
    qq, logs_q, pull_q = low_features(map_q, params, q, 0, q.shape[2], q.shape[2], dtypes, active)
    kk, logs_k, pull_k = low_features(map_k, params, k, 0, length, length, dtypes, active)
    vv, weight = _rows(v, low), None
    logs = log_rows(logs_k, log_weight, keep, 0, length, length, dtype)
    if logs is not None:
        weight = masked((logs - logs.amax(1, keepdim=True)).exp(), keep)
        vv = (vv * weight).to(low)
    else:
        kk = masked(kk, keep)
    aa, bb = (qq, kk) if a is None else (_rows(a, low), masked(_rows(b, low), keep))
    return _Part(qq, aa, kk, bb, vv, weight, keep), (logs_q, pull_q), (logs_k, pull_k)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, T, W] -> [R, T, W]"""
    return to_chunks(x, 0, x.shape[2], x.shape[2], dtype)
