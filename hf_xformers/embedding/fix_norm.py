# SPDX-License-Identifier: Apache-2.0
"""FixNorm: token vectors of unit length."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.components import register
from .base import InputPosition
from .token import TokenEmbedding, TokenEmbeddingSpec


class FixNormEmbedding(TokenEmbedding):
    """x_t = sqrt(D) E[w_t] / |E[w_t]| + type[s_t] + position(t) (Nguyen & Salazar 2019, arXiv 1910.05895, section
    3.2).

    The table itself keeps its lengths, which then matter nowhere; `inputs_embeds` are brought to length 1 alike.
    """

    def word_vectors(self, config) -> nn.Module:
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def initialize(self, config, init) -> None:
        init.uniform_(self.tokens.weight, -0.01, 0.01)

    def forward(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor | None,
        positions: Tensor,
        position: InputPosition,
        **ids: Tensor,
    ) -> Tensor:
        """As [`TokenEmbedding.forward`]."""
        unit = F.normalize(inputs_embeds, dim=-1, eps=1e-5)
        return super().forward(unit * self.scale, token_type_ids, positions, position, **ids)


@register("embedding", "fix_norm")
class FixNormEmbeddingSpec(TokenEmbeddingSpec):
    """scale: multiply the unit vectors by sqrt(hidden_size). The other fields are those of 'token'."""

    summary = "token vectors of unit length"

    scale: bool = True

    def build(self, config, **where) -> FixNormEmbedding:
        return FixNormEmbedding(config, self)
