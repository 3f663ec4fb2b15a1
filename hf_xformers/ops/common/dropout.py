# SPDX-License-Identifier: Apache-2.0
"""Dropout that a backward pass can draw again."""

from __future__ import annotations

import torch
from torch import Tensor


class Dropout:
    """Scaled keep masks from a seed, the same sequence in forward and backward. Without a seed it is inactive."""

    def __init__(self, probability: float, seed: Tensor | None, device: torch.device):
        self.keep, self.active = 1.0 - probability, seed is not None
        self.generator = torch.Generator(device)
        if seed is not None:
            self.generator.manual_seed(int(seed))

    def mask(self, out: Tensor) -> Tensor:
        return out.bernoulli_(self.keep, generator=self.generator).div_(self.keep)


__all__ = ["Dropout"]
