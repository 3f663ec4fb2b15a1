# SPDX-License-Identifier: Apache-2.0
"""Spans that heads learn: their clamp, and a cache that forgets what is beyond all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.cache import WindowLayer, alone


class SpanCacheLayer(WindowLayer):
    """Keys and values of the last tokens only: as many as the longest possible span, or fewer as the heads need."""

    def keep(self, tokens: int) -> None:
        """Forgets all but the last `tokens`, unless a later rollback may want them back."""
        keys, values = self.keys, self.values
        if keys is not None and values is not None and not self.record_past and keys.shape[-2] > tokens:
            first = keys.shape[-2] - tokens
            self.keys, self.values = alone(keys[:, :, first:]), alone(values[:, :, first:])


class UnitClamp(torch.autograd.Function):
    """Clamp to [0, 1] whose gradient lets a number outside come back: it stops only what leads further out."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0.0, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        outward = ((x < 0) & (grad > 0)) | ((x > 1) & (grad < 0))
        return grad.masked_fill(outward, 0.0)
