"""Weights that are read without calling the module that owns them."""

from __future__ import annotations

from torch import Tensor, nn


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """The parameter `name` of `module`, for what reads it outside of the module's own call.

    Where Accelerate keeps weights on the disk or in another memory, its hook brings a module's for each call and takes
    them away after it. Here the hook is asked for them in the same way.
    """
    weight: Tensor = getattr(module, name)
    if not weight.is_meta or not hasattr(module, "_hf_hook"):
        return weight
    module._hf_hook.pre_forward(module)  # type: ignore[union-attr, operator]
    weight = getattr(module, name)
    module._hf_hook.post_forward(module, None)  # type: ignore[union-attr, operator]
    return weight


__all__ = ["weight_of"]
