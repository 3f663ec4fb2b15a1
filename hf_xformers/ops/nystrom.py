# SPDX-License-Identifier: Apache-2.0
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
from torch.utils.checkpoint import checkpoint

from .landmarks import landmark_attention


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

    def solve(matrix: Tensor, summary: Tensor) -> Tensor:
        if pinv_iterations is None:
            return torch.linalg.pinv(matrix) @ summary
        return iterative_pinv(matrix, pinv_iterations, init=pinv_init) @ summary

    return landmark_attention(
        *(query, key, value, solve),
        num_landmarks=num_landmarks,
        key_padding_mask=key_padding_mask,
        query_padding_mask=query_padding_mask,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        exact_when_short=True,
    )


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
