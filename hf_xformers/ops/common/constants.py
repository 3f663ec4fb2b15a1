# SPDX-License-Identifier: Apache-2.0
"""Small constants that stay on the device where they were wanted once: copying one waits for the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def constant(values: Iterable[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)`, kept; nothing may be written to it. Rows of a table are tuples or lists."""
    fixed = _fixed(values)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a graph keeps its own
        return torch.tensor(fixed, dtype=dtype, device=device)
    return _kept(fixed, device, dtype)


def _fixed(values: Any) -> Any:
    return tuple(_fixed(each) for each in values) if isinstance(values, Iterable) else values


@functools.lru_cache(maxsize=256, typed=True)
def _kept(values: Any, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    with torch.inference_mode(False):  # for calls that record gradients as well
        return torch.tensor(values, dtype=dtype, device=device)
