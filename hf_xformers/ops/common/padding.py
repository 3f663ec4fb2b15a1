# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a text are real."""

from __future__ import annotations

import torch
from torch import Tensor

from .real_tokens import first_real


def check_padding_mask(mask: Tensor | None, batch: int, length: int) -> None:
    """Refuses everything but a boolean mask `[batch, length]`."""
    if mask is None:
        return
    if mask.dtype != torch.bool or tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"key_padding_mask must be a boolean tensor of shape ({batch}, {length}) with True for real tokens, got "
            f"{mask.dtype} of shape {tuple(mask.shape)}; attention that never forms the score matrix cannot take a "
            "mask per query and key."
        )


def row_spans(real: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S], True for a real token -> the first one of each row, and the number of places from it to the last one,
    [B] each; 0 and S where a row has none."""
    lead, trail = first_real(real), first_real(real.flip(1))
    return lead, real.shape[1] - trail - lead


def may_look(mask: Tensor) -> bool:
    """Whether its numbers may be read: that is dear on an accelerator and impossible in a graph."""
    return not torch.compiler.is_compiling() and mask.device.type == "cpu"
