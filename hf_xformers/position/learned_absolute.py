# SPDX-License-Identifier: Apache-2.0
"""Learned absolute positions."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.components import bounded, register
from .base import Position, PositionSpec


class LearnedPosition(Position):
    """x_t + P[t + offset], P [max_position_embeddings + offset, D] (Gehring et al. 2017; Devlin et al. 2019).

    RoBERTa and BART checkpoints leave their first two rows unused (`offset=2`).
    """

    def __init__(self, config, spec: LearnedAbsoluteSpec):
        super().__init__()
        self.offset = spec.offset
        width = config.embedding.position_width(config)
        self.table = nn.Embedding(config.max_position_embeddings + spec.offset, width)
        self.padding_idx = config.first_position - 1 if config.first_position else None

    @property
    def position_embeddings(self) -> nn.Module:
        """By this name and by `padding_idx` sentence-transformers knows from where on a model counts positions."""
        return self.table

    def embed(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return hidden_states + self.table(positions + self.offset if self.offset else positions)


@register("position", "learned_absolute", aliases=("learned",))
class LearnedAbsoluteSpec(PositionSpec):
    """offset: unused rows before position 0."""

    supports = frozenset({"context_parallel"})
    summary = "one learned vector per position, added to the input"
    acts = frozenset({"input"})
    any_width = True

    offset: int = bounded(0, least=0)

    def check(self, config) -> None:
        if config.max_position_embeddings < 1:
            raise ValueError(
                f"learned_absolute needs `max_position_embeddings` >= 1, got {config.max_position_embeddings}."
            )

    def max_length(self, config) -> int:
        return config.max_position_embeddings

    def build(self, config, **where) -> LearnedPosition:
        return LearnedPosition(config, self)
