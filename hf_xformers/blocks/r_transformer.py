# SPDX-License-Identifier: Apache-2.0
"""R-Transformer: a recurrent network over a short window before attention."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .window_state import WindowCacheLayer, WindowSublayer, check_window_block

GATES = {"rnn": 1, "gru": 3, "lstm": 4}


class LocalRNN(WindowSublayer):
    """h_t = the last state of a recurrent network over x_{t-M+1} .. x_t, from a zero state; zeros stand before the
    text (Wang et al. 2019, arXiv 1907.05572, section 3.2).

    All windows advance together: M steps, each on the whole text shifted, so nothing of size T M D is unfolded. Cost
    O(T M D^2). State: the last M - 1 inputs.
    """

    def __init__(self, name: str, config, spec: RTransformerBlockSpec, layer_idx: int):
        super().__init__(name, layer_idx)
        self.kind, self.window, width = spec.cell, spec.window, config.hidden_size
        self.input_proj = nn.Linear(width, GATES[spec.cell] * width)
        self.state_proj = nn.Linear(width, GATES[spec.cell] * width)

    def initialize(self, config, init) -> None:
        reach = self.input_proj.in_features**-0.5  # PyTorch's start of a recurrent network
        for projection in (self.input_proj, self.state_proj):
            init.uniform_(projection.weight, -reach, reach)
            init.uniform_(projection.bias, -reach, reach)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        length = hidden_states.shape[1]
        states = self.with_past(hidden_states, self.window - 1, context, past_key_values, step)
        projected = self.input_proj(states)  # each input is projected once, whatever the number of its windows
        hidden = cell = hidden_states.new_zeros(())
        for place in range(self.window):
            hidden, cell = self._advance(projected[:, place : place + length], hidden, cell, first=place == 0)
        return SublayerOutput(hidden)

    def _advance(self, given: Tensor, hidden: Tensor, cell: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """One step of all windows: given [B, T, gates * D], hidden and cell [B, T, D]."""
        # The zero state goes through the map as well, of whose bias an adapter may change something.
        carried = self.state_proj(torch.zeros_like(given[:, :1, : self.state_proj.in_features]) if first else hidden)
        if self.kind == "rnn":
            return torch.tanh(given + carried), cell
        if self.kind == "gru":
            reset, update, new = given.chunk(3, dim=-1)
            reset_carried, update_carried, new_carried = carried.chunk(3, dim=-1)
            update = torch.sigmoid(update + update_carried)
            new = torch.tanh(new + torch.sigmoid(reset + reset_carried) * new_carried)
            return (1 - update) * new + update * hidden, cell
        enter, forget, new, leave = (given + carried).chunk(4, dim=-1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(cell), cell


class RTransformerLayer(XFormerLayer):
    """Local recurrent sublayers, then a vanilla layer."""

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        if entry.name.startswith("local_rnn"):
            return LocalRNN(entry.name, config, config.block, layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)


@register("block", "r_transformer", aliases=("local_rnn",))
class RTransformerBlockSpec(BlockSpec):
    """Wang et al. 2019 (arXiv 1907.05572), section 3. Windows end at their token, in an encoder as well.

    window: M, tokens. cell: `gru`, `lstm` or `rnn` (tanh). rnn_per_layer: recurrent sublayers before each attention.
    """

    mixes: ClassVar[str] = "its recurrence reads a token's neighbors"

    summary = "a recurrent network over each token's window before attention"

    window: int = bounded(6, least=1)
    cell: Literal["gru", "lstm", "rnn"] = "gru"
    rnn_per_layer: int = bounded(1, least=1)

    def check(self, config) -> None:
        if self.window > config.max_position_embeddings:
            raise ValueError(
                f"block 'r_transformer' has a window of {self.window} tokens, more than `max_position_embeddings` "
                f"{config.max_position_embeddings}; shorten it."
            )
        check_window_block("r_transformer", config)

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        # Of type attention: they are given the cache.
        local = [SublayerPlan(f"local_rnn_{number}", "attention") for number in range(self.rnn_per_layer)]
        attention, feedforward = SublayerPlan("attention", "attention"), SublayerPlan("feedforward", "feedforward")
        return [*local, attention, *reading, feedforward]

    def cache_layer(self, config) -> WindowCacheLayer:
        return WindowCacheLayer()

    def build(self, config, **where) -> RTransformerLayer:
        return RTransformerLayer(config, self, **where)
