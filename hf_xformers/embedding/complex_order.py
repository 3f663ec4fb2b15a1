# SPDX-License-Identifier: Apache-2.0
"""Complex word embeddings: a word is a function of its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.precision import Float32Module
from ..core.weight_decay import Undecayed
from .base import EmbeddingSpec, InputPosition


class ComplexEmbedding(Undecayed, Float32Module):
    """f(w, t) = r_w exp(i omega_w t) for each of D / 2 complex channels, as [real | imaginary] (Wang et al. 2020,
    arXiv 1912.12333, section 3; without initial phases, as released).

    The token table [V, D] holds the amplitudes r and the frequencies omega of each word, in float32 at least; so do
    `inputs_embeds`.
    """

    undecayed = ("tokens.weight",)
    readers = ()

    types = None

    def __init__(self, config, spec: ComplexEmbeddingSpec):
        super().__init__()
        self.base = spec.base
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self, config, init) -> None:
        table = self.tokens.weight
        rows, width = table.shape[0], table.shape[1] // 2
        std = config.initializer_range if config.initializer == "normal" else width**-0.5
        channel = torch.arange(width, device=table.device)
        frequency = torch.pow(torch.tensor(float(self.base), device=table.device), -2.0 * (channel // 2) / width)
        amplitude = torch.randn(rows, width, device=table.device) * std
        # One copy of the whole: parts of a table that was loaded would not be known as loaded.
        init.copy_(table, torch.cat((amplitude, frequency.expand(rows, -1)), dim=-1))

    def lookup(self, input_ids: Tensor) -> Tensor:
        """Amplitudes and frequencies [B, T, D]: what `inputs_embeds` replaces."""
        return self.tokens(input_ids)

    def forward(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None, positions: Tensor, position: InputPosition
    ) -> Tensor:
        """inputs_embeds [B, T, D], positions [B or 1, T] -> [B, T, D], real parts before imaginary ones."""
        amplitude, frequency = inputs_embeds.chunk(2, dim=-1)
        wide = torch.float64 if frequency.dtype == torch.float64 else torch.float32
        angles = frequency.to(wide) * positions.to(wide).unsqueeze(-1)
        parts = amplitude * angles.cos().to(amplitude.dtype), amplitude * angles.sin().to(amplitude.dtype)
        return self.dropout(torch.cat(parts, dim=-1))


@register("embedding", "complex_order")
class ComplexEmbeddingSpec(EmbeddingSpec):
    """base: channels start at the frequencies base^(-2 floor(c / 2) / width), the same for every word, and are
    learned."""

    summary = "each channel of a word turns with its place at the word's own frequency"

    base: float | int = bounded(10000.0, above=1)

    def check(self, config) -> None:
        if config.hidden_size % 2:
            raise ValueError(f"complex_order needs an even `hidden_size` (two parts), got {config.hidden_size}.")
        if config.tie_word_embeddings:
            raise ValueError(
                "complex_order keeps amplitudes and frequencies in the token table, which no output can share; set "
                "`tie_word_embeddings=False`."
            )
        if config.type_vocab_size:
            raise ValueError(
                f"complex_order has no token types; set `type_vocab_size=0`, not {config.type_vocab_size}."
            )
        if config.position.acts:
            raise ValueError(
                f"complex_order holds the position itself; use position 'none' with it, not {config.position.type!r}."
            )

    def build(self, config, **where) -> ComplexEmbedding:
        return ComplexEmbedding(config, self)
