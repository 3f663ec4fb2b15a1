# SPDX-License-Identifier: Apache-2.0
"""Compilation layer by layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..blocks.base import XFormerLayer


def compile_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Compiles each layer of `model` by itself, in place, when it is first called, and returns `model`.

    Layers that are alike share their code, so a deep model is ready about as soon as one of two layers: the first
    makes what a call's layers share. What stands around the layers is not compiled.

    Args:
        model: with layers of this package anywhere in it.
        options: of `torch.compile`, such as `mode` and `dynamic`.

    Raises:
        ValueError: there are no such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, XFormerLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers of hf_xformers; compile models of others with"
            " `accelerate.utils.compile_regions`."
        )
    for layer in layers:
        layer.compile(**options)
    return model
