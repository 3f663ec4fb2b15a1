# SPDX-License-Identifier: Apache-2.0
"""torch's fused attention with a mask, by kernels whose gradients are right."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """[`torch.nn.functional.scaled_dot_product_attention`] within [`kernels_for`]."""
    with kernels_for(key, attn_mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


def kernels_for(key: Tensor, mask: Any) -> AbstractContextManager:
    """Where cuDNN's backward pass with a mask gives NaN for queries all of whose scores are below -88 (S % 128 == 64,
    pytorch#196678), torch's other kernels are taken."""
    if mask is None or key.device.type != "cuda" or key.shape[-2] % 128 != 64:
        return nullcontext()
    if not torch.compiler.is_compiling() and not torch.backends.cuda.cudnn_sdp_enabled():
        return nullcontext()  # and whoever has switched it off may have switched off others
    return sdpa_kernel(_NOT_CUDNN)
