# SPDX-License-Identifier: Apache-2.0
"""Reading pieces of tensors without gradients that are as large as the whole.

The derivative of a slice is a tensor of zeros of full size with the piece's gradient in it. A loop over blocks of
queries that slices keys and values, or lays scores by distance out along diagonals, would spend most of its backward
pass filling and adding zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class SharedRows:
    """Rows `[start, stop)` of axis 2 of a tensor `[B, H, S, d]`, taken a known number of times.

    The gradients of all takes are summed in one buffer, which the last of them passes on. Each take must be reached by
    every backward pass, as it is where the results of all blocks are joined.
    """

    def __init__(self, x: Tensor, takes: int) -> None:
        self.x, self.takes = x, takes
        self.buffer: Tensor | None = None
        self.pending = takes
        self.slices = takes == 1 or not (x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling()

    def take(self, start: int, stop: int) -> Tensor:
        """[B, H, stop - start, d]"""
        if self.slices:
            return self.x if stop - start == self.x.shape[2] else self.x[:, :, start:stop]
        return _Take.apply(self.x, self, start, stop)

    def take_at(self, at: Tensor) -> Tensor:
        """The same by their places, of a tensor [1, 1, S, d]: at [...] integer -> [..., d]"""
        if self.slices:
            return self.x[0, 0, at]
        return _TakeAt.apply(self.x, self, at)

    def add(self, grad: Tensor, start: int, stop: int) -> Tensor | None:
        """Adds a take's gradient; the sum of all of them when it was the last one."""
        self._sums(grad)[:, :, start:stop] += grad
        return self._sums_of_all()

    def add_at(self, grad: Tensor, at: Tensor) -> Tensor | None:
        self._sums(grad)[0, 0].index_add_(0, at.flatten(), grad.flatten(0, -2))
        return self._sums_of_all()

    def _sums(self, grad: Tensor) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.zeros_like(self.x, dtype=grad.dtype)
        return self.buffer

    def _sums_of_all(self) -> Tensor | None:
        self.pending -= 1
        if self.pending:
            return None
        whole, self.buffer, self.pending = self.buffer, None, self.takes
        return whole


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shared, start, stop):
        ctx.shared, ctx.bounds = shared, (start, stop)
        return x[:, :, start:stop]

    @staticmethod
    def backward(ctx, grad):
        start, stop = ctx.bounds
        if torch.is_grad_enabled():  # a derivative of the derivative is wanted
            return F.pad(grad, (0, 0, start, ctx.shared.x.shape[2] - stop)), None, None, None
        return ctx.shared.add(grad, start, stop), None, None, None


class _TakeAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shared, at):
        ctx.shared, ctx.at = shared, at
        return x[0, 0, at]

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            whole = torch.zeros_like(ctx.shared.x, dtype=grad.dtype)[0, 0]
            return whole.index_add(0, ctx.at.flatten(), grad.flatten(0, -2))[None, None], None, None
        return ctx.shared.add_at(grad, ctx.at), None, None


def shift_rows(x: Tensor, width: int, step: int = 1) -> Tensor:
    """`[..., t, n]` -> `[..., t, width]`: row r is shifted to the left by `step * (t - 1 - r)` columns.

    Needs `n >= width + step * (t - 1)`. Read as one line, the shift is a fixed stride, so no number is looked up.
    """
    rows, columns = x.shape[-2:]
    if rows == 1:
        return x[..., :width]
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():  # a graph for every length is that of one row, too, which fills its line
            x, columns = F.pad(x, (0, step)), columns + step
        begin, line = step * (rows - 1), columns - step
        return x.flatten(-2)[..., begin : begin + rows * line].unflatten(-1, (rows, line))[..., :width]
    return _Shift.apply(x, width, step)


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width, step):
        ctx.shape, ctx.step = x.shape, step
        return shifted_view(x.contiguous(), width, step)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            return _unshift(grad, ctx.shape, ctx.step), None, None
        result = grad.new_zeros(ctx.shape)
        shifted_view(result, grad.shape[-1], ctx.step).copy_(grad)
        return result, None, None


def shifted_view(x: Tensor, width: int, step: int = 1) -> Tensor:
    """[`shift_rows`] of a contiguous tensor, as a view of it."""
    rows, columns = x.shape[-2:]
    if rows == 1:
        return x[..., :width]
    offset = x.storage_offset() + step * (rows - 1)
    return x.as_strided((*x.shape[:-1], width), (*x.stride()[:-2], columns - step, 1), offset)


def _unshift(grad: Tensor, shape: torch.Size, step: int) -> Tensor:
    """The same derivative in differentiable steps."""
    rows, columns = shape[-2:]
    line = F.pad(grad, (0, columns - step - grad.shape[-1])).flatten(-2)
    return F.pad(line, (step * (rows - 1), rows * columns - step * (rows - 1) - line.shape[-1])).unflatten(
        -1, shape[-2:]
    )
