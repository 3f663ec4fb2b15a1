# SPDX-License-Identifier: Apache-2.0
"""The exponential function where scores and features are many."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def vectorised(x: Tensor) -> bool:
    """Whether [`exp_`] of x takes the way over 2^x: numbers on a processor, of which no derivative is recorded."""
    recorded = (x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling() or torch.jit.is_tracing()
    return x.device.type == "cpu" and not recorded


def exp_(x: Tensor) -> Tensor:
    """e^x in place.

    On a processor as 2^(x log2 e): 2^x runs on its vectors whatever the argument, while e^x is left to a library that
    is three times slower on some processors, and slower yet where results underflow, as those of hidden pairs do.
    """
    return x.mul_(LOG2_E).exp2_() if vectorised(x) else x.exp_()
