"""Dropout modules on the way of every token, which have nothing to do where a model is used."""

from __future__ import annotations

from torch import Tensor, nn


def dropped(dropout: nn.Dropout, states: Tensor) -> Tensor:
    """`dropout(states)`. In evaluation it is called only where something stands behind it, such as an adapter: a call
    for nothing takes longer than the sum that follows it."""
    if dropout.training or dropout._forward_hooks or dropout._forward_pre_hooks or type(dropout) is not nn.Dropout:
        return dropout(states)
    return states


__all__ = ["dropped"]
