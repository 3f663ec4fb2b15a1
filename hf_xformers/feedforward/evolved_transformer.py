# SPDX-License-Identifier: Apache-2.0
"""The Evolved Transformer's feed-forward: a ReLU in encoders, a Swish and a norm in decoders."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..core.components import register
from .dense import DenseFeedForward, DenseFeedForwardSpec


class EvolvedFeedForward(DenseFeedForward):
    """max(0, x W1) W2 in an encoder; norm(swish(x W1)) W2 in a decoder (So, Liang and Le 2019, arXiv 1901.11117,
    figure 3 and the released code, which has the norm)."""

    def __init__(self, config, spec: EvolvedFeedForwardSpec):
        super().__init__(config, spec)
        self.norm: nn.Module | None = None
        if config.is_decoder:
            self.norm = config.normalization.build(config, width=config.intermediate_size)
            self.activation = nn.SiLU()

    def transform(self, hidden_states: Tensor) -> Tensor:
        if self.norm is None:
            return super().transform(hidden_states)
        inner = self.activation(self.up_proj(hidden_states))
        if self.dropout and self.training:
            inner = F.dropout(inner, self.dropout)
        return self.down_proj(self.norm(inner))


@register("feedforward", "evolved_transformer")
class EvolvedFeedForwardSpec(DenseFeedForwardSpec):
    """A ReLU between two projections in an encoder; a Swish and the config's normalization in a decoder."""

    summary = "a ReLU in encoders, a Swish and a norm in decoders"
    activation = "relu"
    splits = frozenset()  # the norm is over all inner channels
    supports = frozenset()

    def check(self, config) -> None:
        norm = config.normalization
        if config.is_decoder and (norm.over_tokens or not norm.any_width):
            raise ValueError(
                f"feedforward 'evolved_transformer' normalizes inner channels in a decoder, which normalization"
                f" {norm.type!r} cannot; use 'layer_norm' or 'rms_norm'."
            )

    def build(self, config, **where) -> EvolvedFeedForward:
        return EvolvedFeedForward(config, self)
