# SPDX-License-Identifier: Apache-2.0
"""Products of queries and keys with the range and the digits that a softmax over them needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .segments import accumulation_dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast switched off on the device of x; nothing where it is off anyhow, as in a decoding step, where switching
    would take as long as the arithmetic."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def autocast_state(device_type: str) -> dict[str, Any]:
    """Arguments of the `torch.autocast` under which a backward pass computes again what is computed now."""
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def wide_products(query: Tensor, key: Tensor) -> Tensor:
    """query [..., t, d] key [..., s, d]^T -> [..., t, s], in float32 at least, under autocast too.

    A softmax reads differences of scores. In bfloat16 two neighboring numbers near 2500, the score of vectors of
    length 100 and width 16, lie 16 apart, and in float16 scores of longer vectors overflow.
    """
    wide = accumulation_dtype(query.dtype)
    with without_autocast(query):
        return torch.matmul(query.to(wide), key.to(wide).mT)


def product(left: Tensor, right: Tensor, into: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """left [n, t, d] right [n, d, s]; or `into`, to which it is added, times alpha, in place.

    Operands of bfloat16 are multiplied as they are and summed in float32: see `operand_dtype`.
    """
    if left.dtype != torch.bfloat16:
        return torch.bmm(left, right) if into is None else into.baddbmm_(left, right, alpha=alpha)
    if into is None:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.baddbmm(into, left, right, out_dtype=torch.float32, alpha=alpha, out=into)


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed columns; zeros, in the gradient as well, where there are none."""
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)


def needs_room(x: Tensor) -> bool:
    """Whether x is of a type with less range or fewer digits than float32."""
    return x.dtype != accumulation_dtype(x.dtype)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of half precision in float32, the others as they are."""
    return tuple(x.to(accumulation_dtype(x.dtype)) for x in tensors)
