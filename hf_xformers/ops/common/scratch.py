# SPDX-License-Identifier: Apache-2.0
"""Memory that tiles share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers that are used again and again: fresh memory costs as much as the arithmetic."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size, key = math.prod(shape), (name, dtype)
        if key not in self.buffers or self.buffers[key].numel() < size:
            self.buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
        return self.buffers[key][:size].view(shape)


__all__ = ["Scratch"]
