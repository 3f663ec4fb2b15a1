# SPDX-License-Identifier: Apache-2.0
"""A causal convolution of a few taps for every channel by itself, before a recurrence.

    out_{t, c} = f(sum_{j < k} w_{c, j} x_{t - k + 1 + j, c} + b_c),    f the identity or SiLU,

where t counts the real tokens of a document. Time O(T C k), memory O(T C).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.row_lookup import take_rows
from ..common.segments import accumulation_dtype


def short_convolution(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    window: Tensor | None = None,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum above over a text or, with a window, over what follows one.

    Args:
        inputs: `[B, T, C]`.
        weight: `[C, k]`, the last tap on the token itself; bias: `[C]`.
        silu: whether SiLU follows.
        window: `[B, k - 1, C]`, the last real inputs before these; zeros without one.
        padding_mask: `[B, T]`, True = real token. Padding, wherever it stands, is as if it were not there; outputs at
            it mean nothing.
        segment_ids: `[B, T]`, the document of each token; taps that reach into another one are left out. A given
            `window` is of the first.

    Returns:
        `[B, T, C]`, and the window after these tokens, both in the dtype of `inputs`. Sums are float32 at least.

    Raises:
        RuntimeError: a derivative of the derivative is asked for.
    """
    batch, length, channels = inputs.shape
    taps = weight.shape[1]
    if window is None:
        window = inputs.new_zeros(batch, taps - 1, channels)
    place = count = None
    if padding_mask is not None and length > 1:  # real tokens first
        real = padding_mask.cumsum(1)
        count = real[:, -1:]
        place = torch.where(padding_mask, real, count + (~padding_mask).cumsum(1)) - 1
        order = torch.empty_like(place).scatter_(1, place, torch.arange(length, device=place.device).expand_as(place))
        inputs = take_rows(inputs[:, None], order[:, None])[:, 0]
        segment_ids = None if segment_ids is None else segment_ids.gather(1, order)
    joined = torch.cat([window.to(inputs.dtype), inputs], dim=1)
    same = None if segment_ids is None or length == 1 else _same_document(segment_ids, taps)
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or length == 1:
        total = _sums(joined, weight, bias, same)
        out = (F.silu(total) if silu else total).to(joined.dtype)
    else:
        out = _ShortConvolution.apply(joined, weight, bias, same, silu)
    if place is not None and count is not None:
        last = count + torch.arange(taps - 1, device=place.device)
        return take_rows(out[:, None], place[:, None])[:, 0], take_rows(joined[:, None], last[:, None])[:, 0]
    if padding_mask is not None:
        return out, torch.where(padding_mask[..., None], joined[:, 1:], joined[:, :-1])
    return out, joined[:, length:]


def token_before(
    inputs: Tensor, window: Tensor | None, padding_mask: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[B, T, C] -> at each real token the one before it in its document, zeros at the first, and the last one of each
    row [B, 1, C]: the short convolution whose two taps are 1 and 0."""
    weight = inputs.new_tensor((1.0, 0.0)).expand(inputs.shape[-1], 2)
    where = {"window": window, "padding_mask": padding_mask, "segment_ids": segment_ids}
    return short_convolution(inputs, weight, silu=False, **where)


def _same_document(segment_ids: Tensor, taps: int) -> Tensor:
    """[B, T, k]: whether the input of each tap is of the token's document."""
    length = segment_ids.shape[1]
    joined = torch.cat([segment_ids[:, :1].expand(-1, taps - 1), segment_ids], dim=1)
    return torch.stack([joined[:, tap : tap + length] == segment_ids for tap in range(taps)], dim=-1)


class _ShortConvolution(torch.autograd.Function):
    """joined [B, k - 1 + T, C], same [B, T, k] or None. Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor, bias: Tensor | None, same: Tensor | None, silu: bool):
        ctx.save_for_backward(joined, weight, bias, same)
        ctx.silu = silu
        total = _sums(joined, weight, bias, same)
        return (F.silu(total, inplace=True) if silu else total).to(joined.dtype)

    @staticmethod
    @first_derivative_only("A short convolution", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        joined, weight, bias, same = ctx.saved_tensors
        wide, length, taps = accumulation_dtype(joined.dtype), grad.shape[1], weight.shape[1]
        grad = grad.to(wide)
        if ctx.silu:
            grad = torch.ops.aten.silu_backward(grad, _sums(joined, weight, bias, same))
        read, weights = joined.to(wide), weight.to(wide)
        to_joined, to_weight = torch.zeros_like(read), torch.empty_like(weights)
        for tap in range(taps):
            seen = grad if same is None else grad * same[..., tap, None]
            to_joined[:, tap : tap + length].addcmul_(seen, weights[:, tap])
            to_weight[:, tap] = (seen * read[:, tap : tap + length]).sum((0, 1))
        to_bias = None if bias is None else grad.sum((0, 1)).to(bias.dtype)
        return to_joined.to(joined.dtype), to_weight.to(weight.dtype), to_bias, None, None


def _sums(joined: Tensor, weight: Tensor, bias: Tensor | None, same: Tensor | None) -> Tensor:
    taps, wide = weight.shape[1], accumulation_dtype(joined.dtype)
    length, read, weight = joined.shape[1] - taps + 1, joined.to(wide), weight.to(wide)
    total = read.new_zeros(read.shape[0], length, read.shape[2])
    if bias is not None:
        total += bias.to(wide)
    for tap in range(taps):
        seen = read[:, tap : tap + length]
        total.addcmul_(seen if same is None else seen * same[..., tap, None], weight[:, tap])
    return total
