# SPDX-License-Identifier: Apache-2.0
"""Attention through landmarks: a few means of consecutive queries and keys stand for all of them.

Three attentions are small in one direction: of queries to landmarks, of landmarks to landmarks, and of landmarks to
keys. What stands between the first and the last is the method's own: a pseudo-inverse (Nystromformer) or the inverse
of the middle one with a ridge (CSALR). Every output depends on the means of all queries: not for causal use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .common.fused import fused_attention
from .common.padding import check_padding_mask
from .common.products import masked_softmax, wide_products, widened
from .common.real_tokens import real_places
from .common.segments import accumulation_dtype

# What is made of the middle attention [B, H, m, m] and of what landmarks read [B, H, m, dv], both in float32 at least.
Solve = Callable[[Tensor, Tensor], Tensor]


def landmark_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    solve: Solve,
    *,
    num_landmarks: int,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    scale: float,
    exact_when_short: bool,
) -> Tensor:
    """softmax(Q Kt^T) solve(softmax(Qt Kt^T), softmax(Qt K^T) V), all scores times `scale`, read from the right: two
    attentions with m queries or m keys, and nothing of size T x T.

    Args:
        query, key, value: `[B, H, T, d]`, `[B, H, S, d]`, `[B, H, S, dv]`.
        num_landmarks: at most so many of queries and of keys, means of [`segment_means`]. The middle attention has
            rows and columns of zeros where there are no tokens.
        key_padding_mask, query_padding_mask: `[B, S]` and `[B, T]`, True = real token.
        exact_when_short: a sequence of no more keys than landmarks gets exact attention.

    Returns:
        `[B, H, T, dv]` in the dtype of `value`. A sequence without real keys gives 0.
    """
    check_padding_mask(key_padding_mask, key.shape[0], key.shape[2])
    check_padding_mask(query_padding_mask, query.shape[0], query.shape[2])
    visible = nonempty = None
    if key_padding_mask is not None:
        # A softmax over nothing is NaN: let an empty sequence see everything and blank its output.
        nonempty = key_padding_mask.any(-1)
        visible = (key_padding_mask | ~nonempty[:, None])[:, None, None, :]
    # In a graph for every length the choice is made row by row, below.
    every = isinstance(key.shape[2], torch.SymInt) and key_padding_mask is not None
    if exact_when_short and not every and key.shape[2] <= num_landmarks:
        return _blank(fused_attention(query, key, value, attn_mask=visible, scale=scale), nonempty)

    landmarks_q, count_q = segment_means(query, num_landmarks, query_padding_mask)
    landmarks_k, count_k = segment_means(key, num_landmarks, key_padding_mask)
    summary = fused_attention(landmarks_q, key, value, attn_mask=visible, scale=scale)
    dtype = accumulation_dtype(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        scores = landmarks_q.to(dtype) @ landmarks_k.to(dtype).mT * scale
        used = None
        if count_k is not None and nonempty is not None:
            used = (count_k > 0) | ~nonempty[:, None]
            scores = scores.masked_fill(~used[:, None, None, :], float("-inf"))
            used = used[:, None, None, :]
        matrix = scores.softmax(-1)
        if count_q is not None:
            # Rows of 0 for landmarks without tokens: a pseudo-inverse then has columns of 0 there.
            matrix = matrix.masked_fill((count_q == 0)[:, None, :, None], 0.0)
        values = solve(matrix, summary.to(dtype))
        # An inverse has large entries where landmarks are alike; what is read of it is small again.
        peak = values.detach().abs().amax((-2, -1), keepdim=True).clamp(min=1.0)
        values = (values / peak).to(value.dtype)
    if exact_when_short and key_padding_mask is not None:
        # Few enough keys to be landmarks themselves: attending to them is exact.
        short = key_padding_mask.sum(-1) <= num_landmarks
        short = short[:, None, None, None]
        values = torch.where(short, segment_means(value, num_landmarks, key_padding_mask)[0], values)
        peak = peak.masked_fill(short, 1.0)
    read = fused_attention(query, landmarks_k, values, attn_mask=used, scale=scale)
    return _blank((read * peak).to(value.dtype), nonempty)


def landmark_factors(
    query: Tensor, key: Tensor, num_landmarks: int, real: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The three attentions of a self-attention written out, in float32 at least: `[B, H, T, m]`, `[B, H, m, m]` and
    `[B, H, m, T]` of query and key `[B, H, T, d]`; real `[B, T]`, True = real token."""
    query, key = widened(query, key)
    query_means, count = segment_means(query, num_landmarks, real)
    key_means, _ = segment_means(key, num_landmarks, real)
    if count is None:
        raise ValueError("`real` is a mask of all tokens; give ones where nothing is padded.")
    used = (count > 0)[:, None, None]  # [B, 1, 1, m]
    first = masked_softmax(wide_products(query, key_means) * scale, used)
    middle = masked_softmax(wide_products(query_means, key_means) * scale, used) * used.mT
    last = masked_softmax(wide_products(query_means, key) * scale, real[:, None, None])
    return first, middle, last


def ridge_solve(matrix: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(matrix + ridge I)^-1 right of `[..., m, m]` and `[..., m, n]`, without forming the inverse.

    A row-stochastic matrix without zeros plus I has an inverse; one whose softmax was rounded to zeros and ones may
    have none (two landmarks that read each other alone), or one that magnifies rounding. So this is a damped
    least-squares solution, refined twice (iterated Tikhonov regularization): a direction with the singular value s
    takes part by 1 - (delta^2 / (s^2 + delta^2))^3, delta^4 being the precision of the numbers. That is all of it
    where there is an inverse to speak of, and nothing where there is none.
    """
    size, damping = matrix.shape[-1], torch.finfo(matrix.dtype).eps ** 0.25
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    shifted = matrix + ridge * identity
    # (A^T A + delta^2) x = A^T right, without the square of A's condition number.
    upper = torch.cat([damping * identity, shifted], -1)
    lower = torch.cat([shifted.mT, -damping * identity], -1)
    factors, pivots = torch.linalg.lu_factor(torch.cat([upper, lower], -2))
    found, left = torch.zeros_like(right), right
    for step in range(3):
        if step:
            left = right - shifted @ found
        given = torch.cat([left, torch.zeros_like(right)], -2)
        found = found + torch.linalg.lu_solve(factors, pivots, given)[..., size:, :]
    return found


def segment_means(x: Tensor, num_segments: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Means of consecutive tokens, for sequences of n real tokens in min(n, num_segments) segments.

    All segments are of n / num_segments tokens, as in the paper, where that is a whole number. Otherwise the first
    ones have one token more than the last ones, so that there are as many segments for every n.

    Args:
        x: `[B, H, T, d]`.
        mask: `[B, T]`, True = real token. Only real tokens are counted and averaged.

    Returns:
        Means `[B, H, m, d]`, m <= num_segments, 0 for segments without tokens; and the tokens per segment `[B, m]`,
        None without a mask, when no segment is empty.
    """
    batch, heads, length, width = x.shape
    if mask is None:
        num_segments = min(num_segments, length)
        size, longer = divmod(length, num_segments)
        border = longer * (size + 1)
        means = x[:, :, border:].unflatten(2, (-1, size)).mean(3)
        return (
            torch.cat([x[:, :, :border].unflatten(2, (-1, size + 1)).mean(3), means], 2) if longer else means
        ), None
    if not isinstance(length, torch.SymInt):  # a graph for every length has room for the most segments
        num_segments = min(num_segments, length)
    total, place = mask.sum(-1, keepdim=True), real_places(mask)
    sizes, more = total // num_segments, total % num_segments
    borders = more * (sizes + 1)
    segment = torch.where(place < borders, place // (sizes + 1), more + (place - borders) // sizes.clamp(min=1))
    member = (segment[:, None, :] == torch.arange(num_segments, device=x.device)[:, None]) & mask[:, None, :]
    count = member.sum(-1)
    # One product for all heads; free of copies when the heads lie side by side, as projections leave them.
    rows = x.transpose(1, 2).reshape(batch, length, heads * width)
    # Divided by a power of two before they are summed, which rounds nothing: sums of many tokens may outgrow float16.
    wide = accumulation_dtype(x.dtype)
    power = torch.exp2(count.clamp(min=1).to(wide).log2().ceil())[..., None]
    with torch.autocast(x.device.type, enabled=False):
        sums = (member / power).to(x.dtype) @ rows
    means = (sums.to(wide) * (power / count.clamp(min=1)[..., None])).to(x.dtype)
    return means.view(batch, num_segments, heads, width).transpose(1, 2), count


def _blank(out: Tensor, nonempty: Tensor | None) -> Tensor:
    return out if nonempty is None else out.masked_fill(~nonempty[:, None, None, None], 0.0)
