# SPDX-License-Identifier: Apache-2.0
"""The convolutions' equation, one tap at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.segments import accumulation_dtype


def token_convolution_reference(inputs: Tensor, kernel: Tensor) -> Tensor:
    """[`token_convolution`](convolution.py) as a sum of shifted inputs, which can be differentiated any number of
    times."""
    heads, taps = kernel.shape[-2:]
    length, wide = inputs.shape[1] - taps + 1, accumulation_dtype(inputs.dtype)
    by_head = inputs.unflatten(-1, (heads, -1)).to(wide)
    shifted = torch.stack([by_head[:, tap : tap + length] for tap in range(taps)], dim=-1)  # [B, T, G, c, k]
    return (shifted * kernel.to(wide).unsqueeze(-2)).sum(-1).flatten(-2).to(inputs.dtype)


__all__ = ["token_convolution_reference"]
