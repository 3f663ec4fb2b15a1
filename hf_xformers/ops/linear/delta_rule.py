# SPDX-License-Identifier: Apache-2.0
"""The delta rule: a linear attention whose state is corrected instead of summed.

Each key first reads what the state `S` holds for it and then writes the difference to its value, with strength beta:

    S_i = S_{i-1} + beta_i k_i^T (v_i - k_i S_{i-1}),    out_i = q_i S_i.

Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", ICML 2021, equations 23-25.
Inside a chunk of C tokens with the state S before it, the written differences U solve a triangular system (the WY form
of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", NeurIPS 2024):

    (I + strictlower(diag(beta) K K^T)) U = diag(beta) (V - K S),
    out = Q S + lower(Q K^T) U,    S <- S + K^T U.

All the triangular inverses of a segment are computed together; only the products with S go from chunk to chunk.
Stability needs `beta |k|^2 <= 2`: sum-normalized non-negative or l2-normalized keys have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.padding import check_padding_mask
from ..common.products import without_autocast
from ..common.segments import (
    accumulate,
    accumulation_dtype,
    active_params,
    features_of,
    in_one_batch,
    keep_chunks,
    masked,
    put_chunks,
    segments,
    to_chunks,
)
from .batched_delta import BatchedDeltaScan
from .fla import delta_rule_kernel


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *params: Tensor,
    feature_map: Callable[..., Tensor] | None = None,
    key_padding_mask: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention by the delta rule. There is no denominator and no scale; an output scale is the caller's.

    Args:
        query, key: `[B, H, T, F]`, normalized features; or `[B, H, T, d]` with a `feature_map`.
        value: values, `[B, H, T, dv]`.
        beta: writing strengths, `[B, H, T]`, usually in (0, 1).
        feature_map: deterministic function `feature_map(x, *params)` of pieces `[B, H, t, d]`, token by token, giving
            normalized features `[B, H, t, F]`. Evaluated for a segment at a time and again in the backward pass, so
            that wide features cost little memory. Only `x` and `params` receive gradients.
        key_padding_mask: `[B, T]`, True = real token; a padded token leaves the state untouched.
        state: `[B, H, F, dv]`, what earlier tokens left.
        return_state: also return the state after the last token, in float32 (float64 for float64 inputs).
        chunk_size: tokens per triangular system on a processor; other devices take what suits them.

    Returns:
        `[B, H, T, dv]` in the dtype of `value`; with `return_state` also the state.

    Raises:
        ValueError: shapes that do not fit, a mask that is not `[B, T]`, `chunk_size < 1`, or a feature map that
            returns a pair (features with a separate scale would not be normalized).
    """
    batch, heads, length, width = key.shape
    if query.shape != key.shape or value.shape[:3] != key.shape[:3] or beta.shape != key.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} and beta "
            f"{tuple(beta.shape)} must be [B, H, T, d], [B, H, T, d], [B, H, T, dv] and [B, H, T]."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    check_padding_mask(key_padding_mask, batch, length)
    dtype = accumulation_dtype(value.dtype)
    if feature_map is not None:  # one token tells how wide the features are; a decoding step has no other
        tokens = torch.cat([query, key], dim=2) if length == 1 else key[:, :, :1].detach()
        with without_autocast(tokens):
            features = feature_map(tokens.to(dtype), *params)
        if not isinstance(features, Tensor):
            raise ValueError("The delta rule needs normalized features, but feature_map returned a pair of tensors.")
        width = features.shape[-1]
        if length == 1:
            query, key = features.chunk(2, dim=2)
    shape = batch, heads, width, value.shape[3]
    if state is not None and state.shape != shape:
        raise ValueError(f"state has shape {tuple(state.shape)}, but these keys and values need {shape}.")
    if length > 1 and in_one_batch(value):
        kernel = delta_rule_kernel(width, value, _on_features)
        if kernel is None:
            inputs = query, key, value, beta, key_padding_mask, state
            out, state = BatchedDeltaScan.apply(*inputs, width, return_state, feature_map, *params)
        else:
            if feature_map is not None:
                with without_autocast(value):
                    query, key = (feature_map(x.to(dtype), *params) for x in (query, key))
            out, state = kernel(query, key, value, beta, key_padding_mask, state)
        return (out, state) if return_state else out
    if state is None:
        state = torch.zeros(shape, dtype=dtype, device=value.device)
    if length == 1:
        out, state = _step(query, key, value, beta, key_padding_mask, state)
    else:
        out, state = _DeltaScan.apply(
            query, key, value, beta, key_padding_mask, state, chunk_size, feature_map, *params
        )
    return (out, state) if return_state else out


def _on_features(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The outputs of a text from its beginning."""
    return BatchedDeltaScan.apply(q, k, v, beta, None, None, k.shape[3], False, None)[0]


def _step(q, k, v, beta, mask, state):
    """One token's features and value: `[B, H, 1, *]`."""
    dtype = state.dtype
    with without_autocast(v):
        q, k, beta = q.to(dtype), k.to(dtype), beta.to(dtype)[..., None]
        if mask is not None:
            beta = beta.masked_fill(~mask[:, None, :, None], 0.0)
        state = torch.addcmul(state, k.mT, beta * (v.to(dtype) - k @ state))
        return (q @ state).to(v.dtype), state


class _Chunks(NamedTuple):
    """What forward and backward need of one segment; tensors `[R, N, ...]`, R = B H rows of states."""

    q: Tensor  # [R, N, C, F]
    k: Tensor
    beta: Tensor  # [R, N, C, 1], 0 at padding
    keep: Tensor | None  # [R N, C, 1]
    gram: Tensor  # [R, N, C, C], K K^T
    inverse: Tensor  # [R, N, C, C], of I + strictlower(diag(beta) K K^T)
    scores: Tensor  # [R, N, C, C], lower(Q K^T)


def _segments(length: int, x: Tensor, chunk: int, width: int) -> list[tuple[int, int]]:
    """`(start, stop)` of what is computed at once: a chunk, since chunks wait for one another anyhow and small tensors
    stay in the cache. A compiler, which unrolls the loop, gets fewer and larger segments."""
    if torch.compiler.is_compiling():
        return segments(length, x, chunk, width)
    return [(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _prepare(q, k, like, beta, mask, start, stop, chunk, rows) -> _Chunks:
    """A segment from the chunks of its features `q, k [R N, C, F]` and its tokens of `beta`; like: `[B, H, T, *]`."""
    dtype = q.dtype
    keep = keep_chunks(mask, like, start, stop, chunk)
    k = masked(k, keep)
    beta = masked(to_chunks(beta[..., None], start, stop, chunk, dtype), keep)
    gram = torch.bmm(k, k.mT)
    identity = torch.eye(chunk, dtype=dtype, device=q.device).expand_as(gram)
    system = (beta * gram).tril_(-1)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    scores = torch.bmm(q, k.mT).tril_()
    tensors = q, k, beta, gram, inverse, scores
    q, k, beta, gram, inverse, scores = (x.view(rows, -1, *x.shape[1:]) for x in tensors)
    return _Chunks(q, k, beta, keep, gram, inverse, scores)


class _DeltaScan(torch.autograd.Function):
    """Keeps queries, keys and, in place of the values, the errors `V - K S` of every token, from which the written
    differences and the changes of the state follow; a state now and then. The rest is computed again."""

    @staticmethod
    def forward(ctx, q, k, v, beta, mask, state, chunk, feature_map, *params):
        length, lead = q.shape[2], q.shape[:2]
        chunk = min(chunk, length)
        bounds, kept = _segments(length, v, chunk, state.shape[2]), []
        out = torch.empty_like(v)
        errors = torch.empty_like(v, dtype=state.dtype)
        current = state.reshape(-1, *state.shape[2:])
        with torch.autocast(q.device.type, enabled=False):
            for index, (start, stop) in enumerate(bounds):
                pieces = [to_chunks(x, start, stop, chunk, current.dtype) for x in (q, k)]
                qq, kk = (features_of(feature_map, params, piece, lead)[0] for piece in pieces)
                part = _prepare(qq, kk, v, beta, mask, start, stop, chunk, current.shape[0])
                current, found, error = _run(part, to_chunks(v, start, stop, chunk, current.dtype), current)
                put_chunks(out, start, stop, found)
                put_chunks(errors, start, stop, error)
                if _keeps_state(index, len(bounds)):
                    kept.append(current)
        ctx.save_for_backward(q, k, errors, beta, mask, torch.stack(kept), *params)
        ctx.options = bounds, chunk, feature_map, v.dtype
        return out, current.view_as(state)

    @staticmethod
    @first_derivative_only("The delta rule", LITERAL)
    def backward(ctx, grad_out, grad_state):
        q, k, errors, beta, mask, kept, *params = ctx.saved_tensors
        bounds, chunk, feature_map, value_dtype = ctx.options
        lead, dtype, shape = q.shape[:2], kept.dtype, grad_state.shape
        grad_q, grad_k, grad_v, grad_beta = (torch.empty_like(x) for x in (q, k, errors, beta))
        active, grad_params = active_params(params, ctx.needs_input_grad)
        grad_state, kept = grad_state.reshape(kept.shape[1:]), list(kept)
        with torch.autocast(q.device.type, enabled=False):
            for index, (start, stop) in reversed(list(enumerate(bounds))):
                if _keeps_state(index, len(bounds)):
                    state = kept.pop()
                pieces = [to_chunks(x, start, stop, chunk, dtype) for x in (q, k)]
                (qq, _, pull_q), (kk, _, pull_k) = (
                    features_of(feature_map, params, piece, lead, active) for piece in pieces
                )
                part = _prepare(qq, kk, q, beta, mask, start, stop, chunk, state.shape[0])
                grad, error = (to_chunks(x, start, stop, chunk, dtype) for x in (grad_out, errors))
                to_q, to_k, to_v, to_beta, state, grad_state = _segment_backward(part, error, state, grad, grad_state)
                to_q, *to_params = pull_q(to_q, None)
                accumulate(grad_params, to_params)
                to_k, *to_params = pull_k(masked(to_k, part.keep), None)
                accumulate(grad_params, to_params)
                to_beta = masked(to_beta.view(-1, chunk, 1), part.keep)
                for target, gradient in ((grad_q, to_q), (grad_k, to_k), (grad_v, to_v), (grad_beta, to_beta)):
                    put_chunks(target, start, stop, gradient)
                # Or they would live on while the next segment is computed.
                del part, qq, kk, pull_q, pull_k, pieces, to_q, to_k, to_v, to_beta, target, gradient
        grad_v = grad_v.to(value_dtype)
        return grad_q, grad_k, grad_v, grad_beta, None, grad_state.reshape(shape), None, None, *grad_params


def _keeps_state(index: int, count: int) -> bool:
    """Whether the state after a segment is kept: after the last, and after every sixteenth, so that what rounding
    leaves when changes are taken back does not add up."""
    return index == count - 1 or index % 16 == 15


def _run(part: _Chunks, values: Tensor, state: Tensor):
    """Chunk after chunk: the state after the segment `[R, F, dv]`, the outputs and the errors `V - K S` `[R, N, C,
    dv]`."""
    outputs, errors = [], []
    values = values.view(*part.k.shape[:3], -1)
    for n in range(part.k.shape[1]):
        error = torch.baddbmm(values[:, n], part.k[:, n], state, alpha=-1)
        written = torch.bmm(part.inverse[:, n], part.beta[:, n] * error)
        found = torch.bmm(part.q[:, n], state)
        outputs.append(found.baddbmm_(part.scores[:, n], written))
        errors.append(error)
        state = torch.baddbmm(state, part.k[:, n].mT, written)
    return state, _in_order(outputs), _in_order(errors)


def _in_order(chunks: list[Tensor]) -> Tensor:
    """`[R, *]` of each chunk -> `[R, N, *]`; a single one is not copied."""
    return chunks[0].unsqueeze(1) if len(chunks) == 1 else torch.stack(chunks, dim=1)


def _segment_backward(part: _Chunks, errors: Tensor, state: Tensor, grad: Tensor, grad_state: Tensor):
    """Gradients (q, k, v, beta), the state before, and its gradient, from the errors of a segment, the state after it,
    and the gradients of its outputs and of that state."""
    errors, grad = (x.view(*part.k.shape[:3], -1) for x in (errors, grad))
    written = part.inverse @ (part.beta * errors)
    through_scores, through_read = part.scores.mT @ grad, part.q.mT @ grad
    befores, systems, afters = [], [], []
    for n in reversed(range(part.k.shape[1])):
        state = torch.baddbmm(state, part.k[:, n].mT, written[:, n], alpha=-1)  # what was written is taken back
        befores.append(state)
        afters.append(grad_state)
        # U = inverse * (beta * error): the gradient of beta * error, then that of the state the error was taken from.
        to_written = torch.baddbmm(through_scores[:, n], part.k[:, n], grad_state)
        systems.append(torch.bmm(part.inverse[:, n].mT, to_written))
        grad_state = grad_state + through_read[:, n]
        grad_state = grad_state.baddbmm_(part.k[:, n].mT, part.beta[:, n] * systems[-1], alpha=-1)
    states, by_system, grads_after = (_in_order(x[::-1]) for x in (befores, systems, afters))
    del befores, systems, afters, through_scores, through_read  # as large as what is made next
    to_v = part.beta * by_system
    to_system = -(by_system @ written.mT).tril_(-1)
    to_scores = (grad @ written.mT).tril_()
    to_beta = (by_system * errors).sum(-1, keepdim=True) + (to_system * part.gram).sum(-1, keepdim=True)
    to_gram = part.beta * to_system
    # In place, since everything of the width of the features is large; tokens last, as maps of features like it.
    flat = [x.flatten(0, 1) for x in (part.q, part.k, states, grads_after, written, grad, to_v)]
    q, k, states, grads_after, written, grad, to_v = flat
    to_q = torch.bmm(states, grad.mT).baddbmm_(k.mT, to_scores.flatten(0, 1).mT)
    to_k = torch.bmm(grads_after, written.mT).baddbmm_(states, to_v.mT, alpha=-1)
    to_k.baddbmm_(q.mT, to_scores.flatten(0, 1)).baddbmm_(k.mT, (to_gram + to_gram.mT).flatten(0, 1))
    return to_q.mT, to_k.mT, to_v, to_beta, state, grad_state
