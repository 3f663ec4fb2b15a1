# SPDX-License-Identifier: Apache-2.0
"""Weights that are read without calling the module that owns them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compat import offloading_hook, under_adapter


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """The parameter `name` of `module`, for what reads it outside of the module's own call.

    Where Accelerate keeps weights on the disk, in another memory or in fewer bits, its hook brings a module's for each
    call and takes them away after it. Here the hook is asked for them in the same way. Of a table with an adapter of
    peft, it is the adapted one.

    Raises:
        ValueError: an adapter that is active on another module, whose weight would be read without it.
    """
    around: Any = module
    inside = under_adapter(module) if name == "weight" else None
    if inside is not None and not (around.merged or around.disable_adapters):
        if not isinstance(inside, nn.Embedding):
            raise ValueError(
                f"An adapter on this {type(inside).__name__} has no effect, as its weight is read without a call;"
                " leave it out of `target_modules`, or name it in `modules_to_save`."
            )
        return module(torch.arange(inside.num_embeddings, device=inside.weight.device))
    weight: Tensor = getattr(module, name)
    hook = offloading_hook(module)
    if hook is None:
        return weight
    hook.pre_forward(module)
    weight = getattr(module, name)
    weight = weight.view_as(weight)  # a parameter that is put back into its former type is the same object
    hook.post_forward(module, None)
    return weight
