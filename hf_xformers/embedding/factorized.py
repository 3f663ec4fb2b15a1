# SPDX-License-Identifier: Apache-2.0
"""Factorized token embedding: a narrow table and a projection onto the model's width."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.components import bounded, register
from .base import EmbeddingSpec, InputPosition


class FactorizedEmbedding(nn.Module):
    """x_t = W norm(E[w_t] + type[s_t]) + b + position(t), then dropout; E [V, e], W [D, e]. With `narrow_positions`
    x_t = W dropout(norm(E[w_t] + type[s_t] + position(t))) + b, as in the released code of ALBERT and ELECTRA.

    Lan et al. 2020 (arXiv 1909.11942), section 3.1: V e + e D parameters instead of V D. The heads `transform` and
    `factorized` lead back to width e, where the table is tied. `inputs_embeds` have width e.
    """

    norm: nn.Module

    def __init__(self, config, spec: FactorizedEmbeddingSpec):
        super().__init__()
        self.narrow_positions = spec.narrow_positions
        self.tokens = nn.Embedding(config.vocab_size, spec.width)
        self.types = nn.Embedding(config.type_vocab_size, spec.width) if config.type_vocab_size else None
        self.norm = config.normalization.build(config, width=spec.width) if spec.normalize else nn.Identity()
        self.proj = nn.Linear(spec.width, config.hidden_size, bias=spec.bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, config, init) -> None:
        if config.initializer == "xavier":
            init.normal_(self.tokens.weight, mean=0.0, std=config.initializer_factor * self.tokens.embedding_dim**-0.5)
        elif config.initializer == "t5":
            init.normal_(self.tokens.weight, mean=0.0, std=config.initializer_factor)

    def lookup(self, input_ids: Tensor) -> Tensor:
        """Token vectors [B, T, e]: what `inputs_embeds` replaces."""
        return self.tokens(input_ids)

    def forward(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None, positions: Tensor, position: InputPosition
    ) -> Tensor:
        """inputs_embeds [B, T, e], token_type_ids [B, T] or None, positions [B or 1, T] -> [B, T, D]."""
        narrow = inputs_embeds
        if self.types is not None:
            narrow = narrow + self.types(positions.new_zeros(1) if token_type_ids is None else token_type_ids)
        if self.narrow_positions:
            return self.proj(self.dropout(self.norm(position.embed(narrow, positions))))
        return self.dropout(position.embed(self.proj(self.norm(narrow)), positions))


@register("embedding", "factorized")
class FactorizedEmbeddingSpec(EmbeddingSpec):
    """
    Args:
        width: e, of the token table.
        narrow_positions: positions are added at width e too, before the norm (ALBERT, ELECTRA), not after the
            projection (RoFormer has none).
        normalize: whether there is the norm.
        bias: whether there is b (OPT has neither).
    """

    splits = frozenset({"table"})
    summary = "a narrow token table and a projection onto the model's width (ALBERT, RoFormer)"

    width: int = bounded(128, least=1)
    narrow_positions: bool = False
    normalize: bool = True
    bias: bool = True

    def check(self, config) -> None:
        if not config.head.leads_back and self.width != config.hidden_size:
            raise ValueError(
                f"embedding 'factorized' of width {self.width} needs the head 'transform' or 'factorized', which lead"
                f" from `hidden_size` {config.hidden_size} back to it, got {config.head.type!r}."
            )
        if self.narrow_positions and "input" in config.position.acts and not config.position.any_width:
            raise ValueError(
                "embedding 'factorized' with `narrow_positions` adds positions at its own width, which position"
                f" {config.position.type!r} has not; use 'learned_absolute' or 'sinusoidal_absolute', or leave"
                " `narrow_positions` off."
            )
        if self.normalize and (config.normalization.over_tokens or not config.normalization.any_width):
            raise ValueError(
                f"embedding 'factorized' normalizes the width {self.width}, which normalization"
                f" {config.normalization.type!r} cannot; use 'layer_norm' or 'rms_norm', or leave `normalize` off."
            )

    def table_width(self, config) -> int:
        return self.width

    def position_width(self, config) -> int:
        return self.width if self.narrow_positions else config.hidden_size

    def build(self, config, **where) -> FactorizedEmbedding:
        return FactorizedEmbedding(config, self)
