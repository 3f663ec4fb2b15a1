"""Nystrom attention: softmax attention approximated through a few landmarks.

Xiong et al., "Nystromformer: A Nystrom-based Algorithm for Approximating Self-Attention", AAAI 2021, equations 12-14:

    out = softmax(Q Kt^T) pinv(softmax(Qt Kt^T)) softmax(Qt K^T) V,

all scores scaled by 1 / sqrt(d), where the landmarks Qt, Kt (m of each) are means of consecutive queries and keys.
Read from the right the product needs two attentions with m queries or m keys and nothing of size T x T. Every output
depends on the means of all queries: not for causal use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .common.padding import check_padding_mask
from .common.real_tokens import real_places
from .common.segments import accumulation_dtype


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_landmarks: int,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    pinv_iterations: int | None = 6,
    pinv_init: str = "per_matrix",
    scale: float | None = None,
) -> Tensor:
    """Bidirectional attention through landmarks.

    The real tokens of each sequence are cut into segments of equal length (up to one token) wherever they stand, so
    that padding, its side and its amount change nothing. A sequence with at most `num_landmarks` keys gets exact
    attention.

    Args:
        query, key, value: `[B, H, T, d]`, `[B, H, S, d]`, `[B, H, S, dv]`.
        num_landmarks: at most so many segments of queries and of keys.
        key_padding_mask, query_padding_mask: `[B, S]` and `[B, T]`, True = real token; self-attention passes the same
            mask twice.
        pinv_iterations: steps of the iterative inverse; None takes the exact pseudo-inverse (which is not always the
            better approximation: the m x m matrix can be ill-conditioned).
        pinv_init: see [`iterative_pinv`].
        scale: of the scores; default 1 / sqrt(d).

    Returns:
        `[B, H, T, dv]` in the dtype of `value`. A sequence without real keys gives 0.

    Raises:
        ValueError: num_landmarks < 1, pinv_iterations < 1, an unknown pinv_init, or a mask of another shape.
    """
    if num_landmarks < 1:
        raise ValueError(f"num_landmarks must be at least 1, got {num_landmarks}.")
    if pinv_iterations is not None and pinv_iterations < 1:
        raise ValueError(f"pinv_iterations must be at least 1, or None for the exact inverse, got {pinv_iterations}.")
    check_padding_mask(key_padding_mask, key.shape[0], key.shape[2])
    check_padding_mask(query_padding_mask, query.shape[0], query.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    visible = nonempty = None
    if key_padding_mask is not None:
        # A softmax over nothing is NaN: let an empty sequence see everything and blank its output.
        nonempty = key_padding_mask.any(-1)
        visible = (key_padding_mask | ~nonempty[:, None])[:, None, None, :]
    if key.shape[2] <= num_landmarks:
        return _blank(F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale), nonempty)

    landmarks_q, count_q = segment_means(query, num_landmarks, query_padding_mask)
    landmarks_k, count_k = segment_means(key, num_landmarks, key_padding_mask)
    summary = F.scaled_dot_product_attention(landmarks_q, key, value, attn_mask=visible, scale=scale)
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
            # Rows of 0 for landmarks without tokens: the inverse then has columns of 0 there.
            matrix = matrix.masked_fill((count_q == 0)[:, None, :, None], 0.0)
        if pinv_iterations is None:
            inverse = torch.linalg.pinv(matrix)
        else:
            inverse = iterative_pinv(matrix, pinv_iterations, init=pinv_init)
        values = inverse @ summary.to(dtype)
        # An inverse has large entries where landmarks are alike; what is read of it is small again.
        peak = values.detach().abs().amax((-2, -1), keepdim=True).clamp(min=1.0)
        values = (values / peak).to(value.dtype)
    if key_padding_mask is not None:
        # Few enough keys to be landmarks themselves: attending to them is exact.
        short = key_padding_mask.sum(-1) <= num_landmarks
        short = short[:, None, None, None]
        values = torch.where(short, segment_means(value, num_landmarks, key_padding_mask)[0], values)
        peak = peak.masked_fill(short, 1.0)
    read = F.scaled_dot_product_attention(query, landmarks_k, values, attn_mask=used, scale=scale)
    return _blank((read * peak).to(value.dtype), nonempty)


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


def iterative_pinv(matrix: Tensor, iterations: int = 6, *, init: str = "per_matrix") -> Tensor:
    """Moore-Penrose inverse `[..., n, m]` of `[..., m, n]` matrices by a third-order iteration. Xiong et al. 2021,
    equation 11.

    Differentiable, and made of matrix products only. Six steps suffice for well-conditioned matrices; each further one
    cubes the error once it is below 1.

    Args:
        init: "per_matrix" scales the start by the norms of each matrix; "global" by the largest norm of all, which is
            what the original code does and makes the result depend on the rest of the batch.

    Raises:
        ValueError: another init.
    """
    if init not in ("per_matrix", "global"):
        raise ValueError(f'pinv_init must be "per_matrix" or "global", got {init!r}.')
    columns = matrix.abs().sum(-2).amax(-1)
    rows = matrix.abs().sum(-1).amax(-1)
    if init == "global":
        columns, rows = columns.max(), rows.max()
    norm = (columns * rows).clamp(min=torch.finfo(matrix.dtype).tiny)
    inverse = matrix.mT / norm[..., None, None]
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)

    def improve(matrix: Tensor, inverse: Tensor) -> Tensor:
        product = matrix @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        return 0.25 * inverse @ (13 * identity - product @ inner)

    for _ in range(iterations):
        # Recomputed in the backward pass: the intermediate matrices of all steps would outweigh the inputs.
        if torch.is_grad_enabled() and matrix.requires_grad:
            inverse = checkpoint(improve, matrix, inverse, use_reentrant=False, preserve_rng_state=False)
        else:
            inverse = improve(matrix, inverse)
    return inverse


def nystrom_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, *, num_landmarks: int, pinv_iterations: int | None = 6
) -> Tensor:
    """The equation with its three factors written out, for sequences without padding that are longer than m."""
    scale = query.shape[-1] ** -0.5
    means_q, means_k = (
        torch.stack([part.mean(2) for part in x.tensor_split(num_landmarks, dim=2)], dim=2) for x in (query, key)
    )
    first, middle, last = (
        (a @ b.mT * scale).softmax(-1) for a, b in ((query, means_k), (means_q, means_k), (means_q, key))
    )
    inverse = torch.linalg.pinv(middle) if pinv_iterations is None else iterative_pinv(middle, pinv_iterations)
    return first @ inverse @ last @ value


def _blank(out: Tensor, nonempty: Tensor | None) -> Tensor:
    return out if nonempty is None else out.masked_fill(~nonempty[:, None, None, None], 0.0)
