# SPDX-License-Identifier: Apache-2.0
"""The delta rule for devices that want few and large operations: all chunks at once, apart from states between them.

With `T` the inverse of the triangular system of a chunk (see `delta_rule`), all that a chunk does to the state S
before it is known without S:

    W = T diag(beta) K,    U0 = T diag(beta) V,    U = U0 - W S,    S <- S - (K^T W) S + K^T U0,

so one small product leads from a state to the next. Chunks are longer than on a processor, hence fewer: their
triangular inverses are put together from those of blocks on the diagonal.

Names as in `delta_rule`: `R = B H` rows of states, `N` chunks, `C` tokens per chunk, `F` features, `dv` value width.
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
    low_features,
    masked,
    operand_dtype,
    put_chunks,
    segments,
    to_chunks,
)

_CHUNK = 256
_BLOCK = 64  # of a triangular inverse; divides the chunk, by a power of two


class BatchedDeltaScan(torch.autograd.Function):
    """Outputs and, where it is to `remember` it, the last state. Keeps the inputs, the written differences U and the
    states before chunks, in the operands' type."""

    @staticmethod
    def forward(ctx, q, k, v, beta, mask, state, *others):
        width, remember, feature_map, *params = others
        length, rows = q.shape[2], q.shape[0] * q.shape[1]
        chunk = _BLOCK
        while chunk < min(length, _CHUNK):
            chunk *= 2
        bounds = segments(length, v, chunk, max(width, 2 * width * width // chunk))
        dtypes = _, low = accumulation_dtype(v.dtype), operand_dtype(v)
        out, kept = torch.empty_like(v), []
        current = None if state is None else state.flatten(0, 1)
        with torch.autocast(q.device.type, enabled=False):
            for start, stop in bounds:
                qq, kk = (low_features(feature_map, params, x, start, stop, chunk, dtypes)[0] for x in (q, k))
                part = _prepare(qq, kk, v, beta, mask, start, stop, chunk, dtypes)
                strong = (part.inverse * part.beta.mT).to(low)
                both = product(strong, torch.cat([part.k, to_chunks(v, start, stop, chunk, low)], dim=-1))
                change = product(part.k.mT, both.to(low))
                more = remember or stop < length
                states = _states(change[..., :width], change[..., width:], current, rows, more)
                current = states[:, -1] if more else None
                before = states[:, :-1].to(low).reshape(-1, width, v.shape[3])
                w = both[..., :width].to(low)
                written = product(w, before, into=both[..., width:], alpha=-1.0).to(low)
                put_chunks(out, start, stop, product(part.scores, written, into=product(part.q, before)))
                kept += [before, written]
        ctx.save_for_backward(q, k, v, beta, mask, *kept, *params)
        ctx.options = bounds, chunk, feature_map, dtypes, len(params), state is not None
        ctx.set_materialize_grads(False)
        if current is None:
            end = v.new_empty(0)
            ctx.mark_non_differentiable(end)
            return out, end
        return out, current.unflatten(0, q.shape[:2]).contiguous()

    @staticmethod
    @first_derivative_only("The delta rule", LITERAL)
    def backward(ctx, grad_out, grad_state):
        q, k, v, beta, mask, *kept = ctx.saved_tensors
        bounds, chunk, feature_map, dtypes, count, given = ctx.options
        kept, params = (kept[:-count], kept[-count:]) if count else (kept, [])
        _, low = dtypes
        grads = tuple(torch.empty_like(x) for x in (q, k, v, beta))
        active, grad_params = active_params(params, ctx.needs_input_grad)
        grad_out = torch.zeros_like(v) if grad_out is None else grad_out
        lead, to_state = q.shape[:2], None
        if grad_state is not None and grad_state.dim() == 4:  # a compiler gives one for the empty tensor, too
            to_state = grad_state.flatten(0, 1)
        with torch.autocast(q.device.type, enabled=False):
            for index, (start, stop) in reversed(list(enumerate(bounds))):
                before, written = kept[2 * index : 2 * index + 2]
                (qq, _, pull_q), (kk, _, pull_k) = (
                    low_features(feature_map, params, x, start, stop, chunk, dtypes, active) for x in (q, k)
                )
                part = _prepare(qq, kk, v, beta, mask, start, stop, chunk, dtypes)
                values, grad = (to_chunks(x, start, stop, chunk, low) for x in (v, grad_out))
                inputs = part, values, before, written, grad, to_state
                to_q, to_k, to_v, to_beta, to_state = _pull(*inputs, lead, given or start > 0)
                to_q, *to_params = pull_q(to_q, None)
                accumulate(grad_params, to_params)
                to_k, *to_params = pull_k(masked(to_k, part.keep), None)
                accumulate(grad_params, to_params)
                for target, gradient in zip(grads, (to_q, to_k, to_v, masked(to_beta, part.keep))):
                    put_chunks(target, start, stop, gradient)
        grad_state = to_state.unflatten(0, lead).contiguous() if given else None
        return *grads, None, grad_state, *[None] * 3, *grad_params


class _Part(NamedTuple):
    """What forward and backward need of one segment."""

    q: Tensor  # [R N, C, F]
    k: Tensor
    beta: Tensor  # [R N, C, 1], 0 at padding
    keep: Tensor | None  # [R N, C, 1]
    gram: Tensor  # [R N, C, C], strictlower(K K^T)
    inverse: Tensor  # [R N, C, C], of I + diag(beta) gram
    scores: Tensor  # [R N, C, C], lower(Q K^T)


def _prepare(q, k, v, beta, mask, start, stop, chunk, dtypes) -> _Part:
    """A segment from the chunks of its features."""
    keep = keep_chunks(mask, v, start, stop, chunk)
    k = masked(k, keep)
    beta = masked(to_chunks(beta[..., None], start, stop, chunk, dtypes[0]), keep)
    gram = product(k, k.mT).tril_(-1)
    return _Part(q, k, beta, keep, gram, unit_lower_inverse(beta * gram), torch.bmm(q, k.mT).tril_())


def unit_lower_inverse(system: Tensor) -> Tensor:
    """Of `I + system`, strictly lower [n, C, C]: blocks on the diagonal, then two by two those next to them."""
    size = system.shape[-1]
    if size <= _BLOCK:
        unit = torch.eye(size, dtype=system.dtype, device=system.device).expand_as(system)
        return torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
    blocks = system.unflatten(2, (-1, _BLOCK)).unflatten(1, (-1, _BLOCK)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    unit = torch.eye(_BLOCK, dtype=system.dtype, device=system.device).expand_as(blocks)
    inverses = torch.linalg.solve_triangular(blocks, unit, upper=False, unitriangular=True)
    inverse = torch.zeros_like(system)
    diagonal = inverse.unflatten(2, (-1, _BLOCK)).unflatten(1, (-1, _BLOCK)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    diagonal.copy_(inverses)
    half = _BLOCK
    while half < size:
        for start in range(0, size, 2 * half):
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
            beside = torch.bmm(system[:, second, first], inverse[:, first, first])
            inverse[:, second, first].baddbmm_(inverse[:, second, second], beside, beta=0.0, alpha=-1.0)
        half *= 2
    return inverse


def _states(matrix: Tensor, change: Tensor, initial: Tensor | None, rows: int, last: bool, reverse=False) -> Tensor:
    """The states `[R, N + 1, F, dv]` of `S_{n+1} = S_n - matrix_n S_n + change_n`, from `initial [R, F, dv]` (None:
    zeros) on; with `reverse` those of `S_n = S_{n+1} - matrix_n^T S_{n+1} + change_n`; the one at the end only if
    `last`. What is added to a state is one product, so that the state itself, which lasts, is not rounded as operands
    of products may be."""
    count, width = change.shape[0] // rows, change.shape[1]
    if torch.compiler.is_compiling():  # a graph takes no part of a tensor to write to
        return _compiled_states(matrix.mT if reverse else matrix, change, initial, count, reverse)
    unit = torch.eye(width, dtype=matrix.dtype, device=matrix.device).expand(matrix.shape)
    left = torch.cat([matrix.mT if reverse else matrix, unit], dim=-1).unflatten(0, (rows, count))
    # A state, and below it minus the change that comes next.
    held = change.new_empty(rows, count + 1, 2 * width, change.shape[2])
    states, steps = held[:, :, :width], held[:, 1:, width:] if reverse else held[:, :-1, width:]
    torch.neg(change.unflatten(0, (rows, count)), out=steps)
    order = [(n, n + 1) for n in range(count)]
    if reverse:
        order = [(after, before) for before, after in reversed(order)]
    first = states[:, order[0][0]]
    _ = first.zero_() if initial is None else first.copy_(initial)
    for here, there in order if last else order[:-1]:
        torch.baddbmm(states[:, here], left[:, min(here, there)], held[:, here], alpha=-1.0, out=states[:, there])
    return states


def _compiled_states(matrix: Tensor, change: Tensor, initial: Tensor | None, count: int, reverse: bool) -> Tensor:
    matrix, change = matrix.unflatten(0, (-1, count)), change.unflatten(0, (-1, count))
    states = [torch.zeros_like(change[:, 0]) if initial is None else initial]
    for n in reversed(range(count)) if reverse else range(count):
        states.append(torch.baddbmm(states[-1] + change[:, n], matrix[:, n], states[-1], alpha=-1.0))
    return torch.stack(states[::-1] if reverse else states, dim=1)


def _pull(part: _Part, values: Tensor, before: Tensor, written: Tensor, grad: Tensor, to_state, lead, earlier: bool):
    """Gradients of q, k, v, beta and the state before a segment, from those of its outputs and the state after."""
    rows, low, width = lead[0] * lead[1], part.k.dtype, part.k.shape[2]
    w = product((part.inverse * part.beta.mT).to(low), part.k).to(low)
    matrix = product(part.k.mT, w)
    to_written = product(part.scores.mT, grad)
    change = product(w.mT, to_written.to(low), into=product(part.q.mT, grad), alpha=-1.0)
    to_states = _states(matrix, change, to_state, rows, earlier, reverse=True)
    after = to_states[:, 1:].to(low).reshape(-1, width, grad.shape[2])
    to_written = product(part.k, after, into=to_written).to(low)
    by_system = product(part.inverse.to(low).mT, to_written)  # the gradient of beta (V - K S)
    to_v = part.beta * by_system
    # What beta multiplies: V - K S - gram U.
    taken = product(part.gram.to(low), written, into=product(part.k, before))
    to_beta = (by_system * (values - taken)).sum(-1, keepdim=True)
    by_values = to_v.to(low)
    to_gram = torch.bmm(by_values, written.mT).tril_(-1)  # with the opposite sign
    to_scores = torch.bmm(grad, written.mT).tril_()
    to_q = product(to_scores, part.k, into=product(grad, before.mT))
    to_k = product(written, after.mT)
    product(by_values, before.mT, into=to_k, alpha=-1.0)
    product(to_scores.mT, part.q, into=to_k)
    product(to_gram + to_gram.mT, part.k, into=to_k, alpha=-1.0)
    return to_q, to_k, to_v, to_beta, to_states[:, 0]
