# SPDX-License-Identifier: Apache-2.0
"""Dropout modules on the way of every token, which have nothing to do where a model is used."""

from __future__ import annotations

from torch import Tensor, nn

from ..compat import has_hooks


def dropped(dropout: nn.Dropout, states: Tensor) -> Tensor:
    """`dropout(states)`. In evaluation it is called only where something stands behind it, such as an adapter: a call
    for nothing takes longer than the sum that follows it."""
    if dropout.training or has_hooks(dropout) or type(dropout) is not nn.Dropout:
        return dropout(states)
    return states


__all__ = ["dropped"]
