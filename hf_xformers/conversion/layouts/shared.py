# SPDX-License-Identifier: Apache-2.0
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


class BareLayout(Layout):
    """The tensors of a model without a head: tables and their norm, layers under `encoder`, a pooler."""

    def __init__(
        self, config: Any, embeddings: Mapping[str, nn.Module], encoder: str, layers: list[nn.Module], pooled: bool
    ):
        super().__init__(config)
        width = config.hidden_size
        self.embeddings = parts({"word_embeddings": nn.Embedding(config.vocab_size, width), **embeddings})
        self.encoder = parts({encoder: nn.ModuleList(layers)})
        self.pooler = parts({"dense": nn.Linear(width, width)}) if pooled else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.get_submodule("word_embeddings")


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
