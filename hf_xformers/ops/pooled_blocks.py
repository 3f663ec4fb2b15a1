# SPDX-License-Identifier: Apache-2.0
"""Blocks of consecutive tokens, each made one vector."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .common.products import widened
from .common.row_lookup import take_rows


def pooled_blocks(x: Tensor, size: int, count: Tensor | None, how: str) -> Tensor:
    """Means or largest numbers of the real tokens of each block of `size`, zeros of a block without any.

    Args:
        x: [B, ..., S, d], real tokens first and zeros behind them.
        count: [B], how many of them are real (None: all).
        how: `mean` or `max`.

    Returns:
        [B, ..., ceil(S / size), d]
    """
    length = x.shape[-2]
    tail = -length % size
    blocks = F.pad(x, (0, 0, 0, tail)).unflatten(-2, (-1, size))
    if count is None and not tail:
        return blocks.mean(-2) if how == "mean" else blocks.amax(-2)
    last = x.new_full(x.shape[:1], length, dtype=torch.long) if count is None else count
    real = torch.arange(length + tail, device=x.device) < last[:, None]
    real = real.view(x.shape[0], *(1,) * (x.ndim - 3), -1, size, 1)
    if how == "mean":
        return (widened(blocks)[0].sum(-2) / real.sum(-2).clamp(min=1)).to(x.dtype)
    return blocks.masked_fill(~real, torch.finfo(x.dtype).min).amax(-2).masked_fill(~real.any(-2), 0.0)


def continued_means(means: Tensor, x: Tensor, size: int, before: Tensor, count: Tensor, new: int) -> Tensor:
    """[`pooled_blocks`] means of x, of which only blocks are read that later tokens than the first `before` reach.

    Args:
        means: [B, H, N, d], of the blocks that the first `before` tokens fill; what stands behind these is made anew.
        x: [B, H, S, d], real tokens first.
        before, count: [B or 1], how many tokens of a row were real, and how many are.
        new: the most tokens that any row has more than before.

    Returns:
        [B, H, ceil(S / size), d]
    """
    batch, heads, length, _ = x.shape
    first = (before // size).expand(batch)
    number = (new + size - 2) // size + 1  # the first of them may begin anywhere in a block
    at = first[:, None] * size + torch.arange(number * size, device=x.device)
    part = take_rows(x, at.clamp(max=length - 1)[:, None].expand(-1, heads, -1)).to(means.dtype)
    part = part.masked_fill((at >= count[:, None])[:, None, :, None], 0.0)
    part = pooled_blocks(part, size, count - first * size, "mean")
    total = -(-length // size)
    rows = F.pad(means, (0, 0, 0, total + number - means.shape[2]))
    at = first[:, None] + torch.arange(number, device=x.device)
    return rows.scatter(2, at[:, None, :, None].expand_as(part), part)[:, :, :total]
