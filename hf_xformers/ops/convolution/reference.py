# SPDX-License-Identifier: Apache-2.0
"""The convolutions' equation, one tap at a time."""

from __future__ import annotations

from torch import Tensor

from ..common.segments import accumulation_dtype


def token_convolution_reference(inputs: Tensor, kernel: Tensor) -> Tensor:
    """[`token_convolution`](convolution.py) as a sum of shifted inputs, which can be differentiated any number of
    times, and which compilers fuse."""
    heads, taps = kernel.shape[-2:]
    length, wide = inputs.shape[1] - taps + 1, accumulation_dtype(inputs.dtype)
    by_head, kernel = inputs.to(wide).unflatten(-1, (heads, -1)), kernel.to(wide)
    total = by_head[:, :length] * kernel[..., 0, None]
    for tap in range(1, taps):
        total = total + by_head[:, tap : tap + length] * kernel[..., tap, None]
    return total.flatten(-2).to(inputs.dtype)
