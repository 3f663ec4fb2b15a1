"""Token embedding: one vector per token, plus type and position terms."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..core.components import register
from .base import EmbeddingSpec, InputPosition


class TokenEmbedding(nn.Module):
    """x_t = scale * E[w_t] + type[s_t] + position(t), optionally normalised, then dropout.

    Vaswani et al. 2017, section 3.4 (`scale=True`: sqrt(D)); Devlin et al. 2019, section 3 (`normalize=True`, types).
    """

    def __init__(self, config, spec: TokenEmbeddingSpec):
        super().__init__()
        self.spec = spec
        self.max_types = config.type_vocab_size
        # No padding index: a seq2seq decoder may start with the padding token, whose vector must learn.
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.norm = config.normalization.build(config) if spec.normalize else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.scale = math.sqrt(config.hidden_size) if spec.scale else 1.0

    def initialize(self, config, init) -> None:
        if config.initializer == "xavier":  # with the sqrt(D) scale, inputs then have unit variance
            init.normal_(self.tokens.weight, mean=0.0, std=config.initializer_factor * config.hidden_size**-0.5)
        elif config.initializer == "t5":
            init.normal_(self.tokens.weight, mean=0.0, std=config.initializer_factor)

    def lookup(self, input_ids: Tensor) -> Tensor:
        """Token vectors [B, T, D] before any scaling: what `inputs_embeds` replaces."""
        return self.tokens(input_ids)

    def forward(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None, positions: Tensor, position: InputPosition
    ) -> Tensor:
        """inputs_embeds [B, T, D], token_type_ids [B, T] or None, positions [B or 1, T] -> [B, T, D]."""
        hidden_states = inputs_embeds * self.scale if self.spec.scale else inputs_embeds
        if self.types is not None:
            if token_type_ids is None:  # type 0 throughout; a row of the table, not a lookup of T equal ids
                hidden_states = hidden_states + self.types.weight[0]
            else:
                hidden_states = hidden_states + self.types(token_type_ids)
        elif token_type_ids is not None:
            raise ValueError("`token_type_ids` were given to a model with `type_vocab_size=0`; leave them out.")
        hidden_states = position.embed(hidden_states, positions)
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        return self.dropout(hidden_states)


@register("embedding", "token")
class TokenEmbeddingSpec(EmbeddingSpec):
    """scale: multiply token vectors by sqrt(hidden_size). normalize: normalise the sum before dropout (BERT, BART)."""

    context_parallel = True
    summary = "token (+ type) vectors plus an input position"

    scale: bool = False
    normalize: bool = False

    def normalizes(self) -> bool:
        return self.normalize

    def build(self, config, **where) -> TokenEmbedding:
        return TokenEmbedding(config, self)
