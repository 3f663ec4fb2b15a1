# SPDX-License-Identifier: Apache-2.0
"""Sinusoids of signed distances."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_sinusoids(distance: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """R_d = [sin(d / 10000^(2i/width)) | cos(...)], distance [n] -> [n, width], computed in float32 at least."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, width, 2, device=distance.device, dtype=wide) / width
    angles = distance.to(wide)[:, None] * torch.pow(10000.0, -exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
