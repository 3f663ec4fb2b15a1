"""What layouts of BERT's relatives share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init


class Layout(PreTrainedModel):
    """A class that names and holds tensors."""

    def _init_weights(self, module: nn.Module) -> None:
        """Zeros, for the while until what a file lacks is refused."""
        for parameter in module.parameters(recurse=False):
            init.zeros_(parameter)


def parts(named: Mapping[str, nn.Module]) -> nn.Module:
    """A module with these parts."""
    whole = nn.Module()
    for name, part in named.items():
        whole.add_module(name, part)
    return whole


def dense_and_norm(config: Any, inputs: int) -> nn.Module:
    """A projection to the states' width, and its norm, by BERT's names."""
    width = config.hidden_size
    return parts({"dense": nn.Linear(inputs, width), "LayerNorm": nn.LayerNorm(width)})


__all__ = ["Layout", "dense_and_norm", "parts"]
