# SPDX-License-Identifier: Apache-2.0
"""A convolution over the sequence with one kernel for each head, as products of matrices.

The usual kernels for such a convolution multiply a number at a time. Here a block of tokens is multiplied with the
band matrix of its head: twice as much arithmetic, at the speed of matrix products, which is a multiple of theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .common.derivatives import LITERAL, first_derivative_only

BLOCK = 64
# Shorter kernels leave most of a band matrix empty.
LEAST_TAPS = 24


def convolve_heads(value: Tensor, weight: Tensor, literal: bool = False) -> Tensor:
    """out_t = sum_k w_k value_(t + k - K // 2), zeros beyond the ends, for each head.

    value [B, H, T, d], weight [H, K], K odd -> [B, H, T, d]. literal: in one step that can be differentiated twice.

    Raises:
        RuntimeError: a derivative of the derivative is asked for, unless `literal`.
    """
    products = (
        not literal
        and LEAST_TAPS <= weight.shape[1] <= BLOCK + 1
        and value.device.type == "cpu"
        and value.dtype == weight.dtype
        and value.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )
    if products:
        return _ConvolveHeads.apply(value, weight)
    kernel = weight[:, None, :, None]
    return F.conv2d(value, kernel, padding=(weight.shape[1] // 2, 0), groups=weight.shape[0])


def convolve_heads_reference(value: Tensor, weight: Tensor) -> Tensor:
    """[`convolve_heads`] as a sum of shifted values, one for each of the kernel's numbers."""
    length, taps = value.shape[2], weight.shape[1]
    padded = F.pad(value, (0, 0, taps // 2, taps // 2))
    return torch.stack([weight[:, k, None, None] * padded[:, :, k : k + length] for k in range(taps)]).sum(0)


class _ConvolveHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        blocks, band = _blocks(value, weight.shape[1] // 2), _band(weight)
        result = torch.empty_like(blocks)
        for head, own in enumerate(band):
            left, right = _halves(own, blocks.shape[1] - 1)
            target = result[head, :-1]
            torch.bmm(left, blocks[head, :-1], out=target).baddbmm_(right, blocks[head, 1:])
        return _rows(result, 0, value)

    @staticmethod
    @first_derivative_only("A convolution over heads", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        value, weight = ctx.saved_tensors
        taps = weight.shape[1]
        upstream, band = _blocks(grad, 0), _band(weight)
        grad_value = grad_weight = None
        if ctx.needs_input_grad[0]:
            found = torch.zeros_like(upstream)
            for head, own in enumerate(band):
                left, right = _halves(own, upstream.shape[1] - 1)
                found[head, :-1].baddbmm_(left.mT, upstream[head, :-1])
                found[head, 1:].baddbmm_(right.mT, upstream[head, :-1])
            grad_value = _rows(found, taps // 2, value)
        if ctx.needs_input_grad[1]:
            blocks, sums = _blocks(value, taps // 2), torch.empty_like(band)
            for head in range(band.shape[0]):
                above = upstream[head, :-1]
                for half, below in enumerate((blocks[head, :-1], blocks[head, 1:])):
                    sums[head, :, half * BLOCK : (half + 1) * BLOCK] = torch.bmm(above, below.mT).sum(0)
            grad_weight = _taps(sums, taps).sum(1)
        return grad_value, grad_weight


def _blocks(x: Tensor, before: int) -> Tensor:
    """[B, H, T, d] -> blocks of tokens [H, n, BLOCK, d], a block longer than each row needs: `before` zeros first."""
    batch, heads, length, width = x.shape
    count = -(-length // BLOCK) + 1
    laid = x.new_zeros(heads, batch, count * BLOCK, width)
    laid[:, :, before : before + length] = x.transpose(0, 1)
    return laid.view(heads, batch * count, BLOCK, width)


def _rows(blocks: Tensor, before: int, like: Tensor) -> Tensor:
    """The reverse of [`_blocks`]."""
    batch, heads, length, width = like.shape
    return blocks.view(heads, batch, -1, width)[:, :, before : before + length].transpose(0, 1)


def _band(weight: Tensor) -> Tensor:
    """[H, K] -> [H, BLOCK, 2 BLOCK]: each row has the kernel one place further."""
    band = weight.new_zeros(weight.shape[0], BLOCK, 2 * BLOCK)
    _taps(band, weight.shape[1]).copy_(weight[:, None])
    return band


def _taps(band: Tensor, taps: int) -> Tensor:
    """Where the kernels stand in [`_band`], [H, BLOCK, K], as a view."""
    return band.as_strided((band.shape[0], BLOCK, taps), (band.stride(0), 2 * BLOCK + 1, 1))


def _halves(own: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What multiplies a block and what multiplies the next one, for all blocks."""
    left, right = own.split(BLOCK, dim=-1)
    return left.expand(count, -1, -1), right.expand(count, -1, -1)
