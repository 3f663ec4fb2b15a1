# SPDX-License-Identifier: Apache-2.0
"""Blocks of consecutive tokens, each made one vector."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .common.products import widened


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


__all__ = ["pooled_blocks"]
