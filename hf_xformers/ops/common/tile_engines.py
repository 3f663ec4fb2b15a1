# SPDX-License-Identifier: Apache-2.0
"""What engines that work tile by tile share: how inputs are cast, dropout that a backward pass can draw again, and
memory for tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts the inputs of dense attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


class Dropout:
    """Scaled keep masks from a seed, the same sequence in forward and backward. Without a seed it is inactive."""

    def __init__(self, probability: float, seed: Tensor | None, device: torch.device):
        self.keep, self.active = 1.0 - probability, seed is not None
        self.generator = torch.Generator(device)
        if seed is not None:
            self.generator.manual_seed(int(seed))

    def mask(self, out: Tensor) -> Tensor:
        return out.bernoulli_(self.keep, generator=self.generator).div_(self.keep)


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
