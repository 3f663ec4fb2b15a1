# SPDX-License-Identifier: Apache-2.0
"""What stands between the states of a trunk and the labels of a classifier."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN


class ClassifierTransform(nn.Module):
    """act(W h + b), W [D, D], and with `dense_norm` the config's normalization of it: the hidden layer in front of the
    labels of EuroBERT, and of ModernBERT (Warner et al. 2024, arXiv 2412.13663, released code)."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.dense = nn.Linear(width, width, bias=config.classifier_bias)
        self.activation = ACT2FN[config.classifier_activation]
        normed = config.classifier_transform == "dense_norm"
        self.norm: nn.Module | None = config.normalization.build(config, width=width) if normed else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        hidden_states = self.activation(self.dense(hidden_states))
        return hidden_states if self.norm is None else self.norm(hidden_states)


def build_transform(config) -> ClassifierTransform | None:
    """The transform that `config.classifier_transform` asks for; None: states go to the labels as they are."""
    return None if config.classifier_transform == "none" else ClassifierTransform(config)


def refuse_transform(config, name: str) -> None:
    """For heads named `name`, which read a text's vector as it is.

    Raises:
        ValueError: the config asks for a transform.
    """
    if config.classifier_transform != "none":
        raise ValueError(
            f"{name} labels pairs of texts without a hidden layer, got"
            f" `classifier_transform={config.classifier_transform!r}`; leave it at 'none'."
        )
