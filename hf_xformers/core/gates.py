# SPDX-License-Identifier: Apache-2.0
"""Gates that switch sublayers off token by token, and what they tell the stack that feeds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.hand_overs import HandOver
from .call import Call
from .prepared import Prepared

OPEN, ALL = "gates_open", "gates_all"


class GateNoise(Prepared):
    """alpha of [`Gates`] in a training pass."""

    alpha: Tensor


class Gates(nn.Module):
    """n gates for each token (Bapna et al. 2020, arXiv 2002.07106).

    G(x) = W_2 relu(W_1 x). Training: g = sigmoid(G(x) + alpha * eps), eps ~ N(0, 1), where alpha grows, so that only
    values far from 0 survive the noise. Evaluation: g = 1 if G(x) >= 0, else 0. Float32 at least. At the start most
    gates are open (`gate_bias`), so that an untrained model is a whole one.
    """

    def __init__(self, config, count: int):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.stack.gate_size)
        self.outer = nn.Linear(config.stack.gate_size, count)

    def initialize(self, config, init) -> None:
        init.constant_(self.outer.bias, config.stack.gate_bias)

    def forward(self, tokens: Tensor, context: Call) -> Tensor:
        """[B, T, D] -> [B, T, n] in the dtype of `tokens`."""
        logits = self.outer(torch.relu(self.inner(tokens)))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self.training:
            return (logits >= 0).to(tokens.dtype)
        return torch.sigmoid(logits + context.prepared(GateNoise).alpha * torch.randn_like(logits)).to(tokens.dtype)


def gate_usage(*gates: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
    """Sums for the budget: of each (gates [B, T, n], real tokens [B, T] or None), how much is open, and of how
    much."""
    opened, total = [], []
    for gate, real in gates:
        wide = gate if gate.dtype == torch.float64 else gate.float()
        weight = torch.ones_like(wide) if real is None else real.unsqueeze(-1).to(wide.dtype).expand_as(wide)
        opened.append((wide * weight).sum())
        total.append(weight.sum())
    return {OPEN: torch.stack(opened).sum(), ALL: torch.stack(total).sum()}


def check_stack(component, config) -> None:
    """Gates need a stack that feeds them. Raises `ValueError` otherwise."""
    if HandOver.GATE_NOISE not in config.stack.gives:
        raise ValueError(
            f"{component.slot} {component.type!r} has gates that the stack {config.stack.type!r} gives no noise and no"
            " budget; set `stack='conditional_computation'`."
        )
