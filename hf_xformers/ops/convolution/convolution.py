# SPDX-License-Identifier: Apache-2.0
"""Lightweight and dynamic convolution: a kernel for each head, given or made anew for each token.

    out_{t, c} = sum_{j < k} w_{t, g(c), j} x_{t + j, c},

with the channels c of head g sharing a kernel (Wu, Fan, Baevski, Dauphin and Auli 2019, arXiv 1901.10430, sections 3
and 4). Time O(T C k), memory O(T (C + G k)): no window is unfolded, and no band of a [T, T] matrix is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.segments import accumulation_dtype
from .reference import token_convolution_reference


def token_convolution(inputs: Tensor, kernel: Tensor) -> Tensor:
    """The sum above over the `k` inputs from each token's first on.

    inputs [B, T + k - 1, C]: with what stands before and after the text (zeros, or what a cache has kept), so that the
    same sum is causal (k - 1 inputs before), centered, or a single step of decoding (T = 1). kernel [B, T, G, k]
    (dynamic) or [G, k] (lightweight), G a divisor of C -> [B, T, C]. Sums are float32 at least.

    Raises:
        ValueError: inputs and kernel do not fit.
        RuntimeError: a derivative of the derivative is asked for.
    """
    heads, taps = kernel.shape[-2:]
    length = inputs.shape[1] - taps + 1
    if inputs.shape[-1] % heads or length < 0:
        raise ValueError(
            f"A convolution with kernels {list(kernel.shape)} needs channels in {heads} heads and {taps} tokens or"
            f" more, got inputs {list(inputs.shape)}."
        )
    kernel = kernel.expand(inputs.shape[0], length, heads, taps)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return token_convolution_reference(inputs, kernel)
    return _TokenConvolution.apply(inputs, kernel)


class _TokenConvolution(torch.autograd.Function):
    """inputs [B, T + k - 1, C], kernel [B, T, G, k]. Keeps both and nothing of size T C k."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, kernel)
        heads, taps = kernel.shape[-2:]
        length, wide = kernel.shape[1], accumulation_dtype(inputs.dtype)
        by_head, weights = inputs.to(wide).unflatten(-1, (heads, -1)), kernel.to(wide)
        total = by_head[:, :length] * weights[..., 0, None]
        for tap in range(1, taps):
            total.addcmul_(by_head[:, tap : tap + length], weights[..., tap, None])
        return total.flatten(-2).to(inputs.dtype)

    @staticmethod
    @first_derivative_only("A convolution over tokens", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        inputs, kernel = ctx.saved_tensors
        heads, taps = kernel.shape[-2:]
        length, wide = kernel.shape[1], accumulation_dtype(inputs.dtype)
        upstream = grad.to(wide).unflatten(-1, (heads, -1))
        by_head = inputs.to(wide).unflatten(-1, (heads, -1))
        grad_inputs = grad_kernel = None
        if ctx.needs_input_grad[0]:
            weights, found = kernel.to(wide), torch.zeros_like(by_head)
            for tap in range(taps):
                found[:, tap : tap + length].addcmul_(upstream, weights[..., tap, None])
            grad_inputs = found.flatten(-2).to(inputs.dtype)
        if ctx.needs_input_grad[1]:
            sums = upstream.new_empty(kernel.shape)
            for tap in range(taps):
                torch.sum(upstream * by_head[:, tap : tap + length], dim=-1, out=sums[..., tap])
            grad_kernel = sums.to(kernel.dtype)
        return grad_inputs, grad_kernel


__all__ = ["token_convolution", "token_convolution_reference"]
