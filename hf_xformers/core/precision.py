# SPDX-License-Identifier: Apache-2.0
"""What is computed and kept in float32: modules that stay in it in half precision, and products on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..compat import own_parameters


def allow_tf32() -> None:
    """Lets a GPU, where there is one, take matrix products of float32 by its TF32 units, with 10 bits of fraction."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")


class Float32Module(nn.Module):
    """A module whose floating parameters and buffers, and those of its children, never become less than float32.

    For numbers that are multiplied by positions or summed over them, such as learned frequencies: rounded to bfloat16,
    a frequency is wrong by up to 1 in 256, so that an angle at position 2000 is wrong by several turns.
    `model.half()`, `model.bfloat16()` and `model.to(dtype)` leave them in float32, and so does
    `from_pretrained(dtype=...)` ([`float32_names`]). What such a module gives out is brought to the type of the states
    it joins.

    Attributes:
        readers: the methods that read the parameters. Empty: the calls of the modules inside do.
    """

    readers: ClassVar[tuple[str, ...]] = ("forward",)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            if found.is_floating_point() and found.dtype.itemsize < torch.float32.itemsize:
                return tensor.to(device=found.device, dtype=torch.float32)
            return found

        return super()._apply(keep, recurse)


def float32_names(model: nn.Module) -> set[str]:
    """The names of all parameters and buffers of `model` that stay in float32; counters are integers."""
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, Float32Module):
            tensors = (*module.named_parameters(), *module.named_buffers())
            names |= {f"{prefix}.{name}" for name, tensor in tensors if tensor.is_floating_point()}
    return names


def computing_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of the first floating parameter that is free to be in half precision; None if there is none."""
    if isinstance(model, Float32Module):
        return None
    for parameter in own_parameters(model):
        if parameter.is_floating_point():
            return parameter.dtype
    for child in model.children():  # `generate` asks at every step: no list of all parameters
        found = computing_dtype(child)
        if found is not None:
            return found
    return None
