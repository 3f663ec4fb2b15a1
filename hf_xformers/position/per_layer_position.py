# SPDX-License-Identifier: Apache-2.0
"""Positions added to the input of every layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from .base import Position, PositionSpec
from .sinusoidal_absolute import sinusoids


class PerLayerPosition(Position):
    """x <- x + P^l before layer l: the residual stream itself gets the position again."""

    def __init__(self, config, spec: PerLayerPositionSpec):
        super().__init__()
        self.spec = spec
        tables = {"sinusoidal": 0, "learned": 1, "learned_per_layer": config.stack.num_steps(config)}[spec.source]
        width, length = config.hidden_size, config.max_position_embeddings
        self.tables = nn.ModuleList(nn.Embedding(length, width) for _ in range(tables))

    def embed_layer(self, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        if self.spec.source == "sinusoidal":
            width, base = hidden_states.shape[-1], self.spec.base
            signal = sinusoids(positions, width, base, "interleaved")
            if self.spec.depth_signal:
                depth = torch.full((1,), step + 1, device=positions.device)
                signal = signal + sinusoids(depth, width, base, "interleaved")
            return hidden_states + signal.to(hidden_states.dtype)
        return hidden_states + self.tables[step if len(self.tables) > 1 else 0](positions)


@register("position", "per_layer_position")
class PerLayerPositionSpec(PositionSpec):
    """source: `sinusoidal` (Dehghani et al. 2019), one `learned` table (Guo et al. 2019), or one table for each layer,
    `learned_per_layer` (Al-Rfou et al. 2019, arXiv 1808.04444, section 3.3). depth_signal: also a sinusoid of the
    layer's number, from 1 (Dehghani et al. 2019, arXiv 1807.03819, section 2.1). base: of the sinusoids.
    """

    summary = "positions added to the input of every layer"
    acts = frozenset({"layer_input"})

    source: Literal["sinusoidal", "learned", "learned_per_layer"] = "learned_per_layer"
    depth_signal: bool = False
    base: float | int = bounded(10000.0, above=1)

    def check_fields(self) -> None:
        if self.depth_signal and self.source != "sinusoidal":
            raise ValueError(
                f"per_layer_position has a depth signal with source 'sinusoidal' alone, not {self.source!r};"
                " leave `depth_signal` out."
            )

    def check(self, config) -> None:
        if self.source == "sinusoidal" and config.hidden_size % 2:
            raise ValueError(
                f"per_layer_position needs an even `hidden_size` for sinusoids, got {config.hidden_size}."
            )

    def max_length(self, config) -> int | None:
        return None if self.source == "sinusoidal" else config.max_position_embeddings

    def build(self, config, **where) -> PerLayerPosition:
        return PerLayerPosition(config, self)
