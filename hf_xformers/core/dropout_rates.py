# SPDX-License-Identifier: Apache-2.0
"""Dropout probabilities that functions take, where tools find them."""

from __future__ import annotations

from typing import Any

from torch import nn


def dropout_rate(name: str) -> Any:
    """A dropout probability as an attribute of a module, kept by an `nn.Dropout` that is called `name`.

    Fused functions take a probability. What switches dropout off in any model, as trl's trainers do, goes through the
    modules of this class and sets their `p`.
    """

    def read(module: nn.Module) -> float:
        rate: float = getattr(module, name).p
        return rate

    def write(module: nn.Module, rate: float) -> None:
        setattr(module, name, nn.Dropout(rate))

    return property(read, write)


__all__ = ["dropout_rate"]
