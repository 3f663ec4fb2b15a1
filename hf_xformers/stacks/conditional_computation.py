"""Conditional computation: a budget for gates that switch sublayers off token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.components import register
from ..core.context import LayerContext
from .base import StackOutput, StackSpec
from .plain import PlainStack

_NOISE = "gate_noise"
_OPEN, _ALL = "gates_open", "gates_all"


class Gates(nn.Module):
    """n gates for each token (Bapna et al. 2020, arXiv 2002.07106).

    G(x) = W_2 relu(W_1 x). Training: g = sigmoid(G(x) + alpha * eps), eps ~ N(0, 1), where alpha grows, so that only
    values far from 0 survive the noise. Evaluation: g = 1 if G(x) >= 0, else 0. Float32 at least. At the start most gates
    are open (`gate_bias`), so that an untrained model is a whole one.
    """

    def __init__(self, config, count: int):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.stack.gate_size)
        self.outer = nn.Linear(config.stack.gate_size, count)

    def initialize(self, config, init) -> None:
        init.constant_(self.outer.bias, config.stack.gate_bias)

    def forward(self, tokens: Tensor, context: LayerContext) -> Tensor:
        """[B, T, D] -> [B, T, n] in the dtype of `tokens`."""
        logits = self.outer(torch.relu(self.inner(tokens)))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self.training:
            return (logits >= 0).to(tokens.dtype)
        return torch.sigmoid(logits + context.shared[_NOISE] * torch.randn_like(logits)).to(tokens.dtype)


def gate_usage(*gates: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
    """Sums for the budget: of each (gates [B, T, n], real tokens [B, T] or None), how much is open, and of how much."""
    opened, total = [], []
    for gate, real in gates:
        wide = gate if gate.dtype == torch.float64 else gate.float()
        weight = torch.ones_like(wide) if real is None else real.unsqueeze(-1).to(wide.dtype).expand_as(wide)
        opened.append((wide * weight).sum())
        total.append(weight.sum())
    return {_OPEN: torch.stack(opened).sum(), _ALL: torch.stack(total).sum()}


class ConditionalStack(PlainStack):
    """Every layer once, in order; sublayers decide by themselves which tokens they work on.

    In training it gives the noise alpha = noise_max * min(1, t / noise_steps) of training pass t = 0, 1, ... to all gates
    of the tower, and adds the loss |mean of all gates at real tokens - budget|. A pass counts (in the buffer `passes`) if
    gates learn from it: with gradients on, and gates that are not frozen.
    """

    def __init__(self, spec: ConditionalComputationSpec):
        super().__init__()
        self.spec = spec
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def initialize(self, config, init) -> None:
        init.zeros_(self.passes)

    def forward(
        self,
        layers: nn.ModuleList,
        hidden_states: Tensor,
        context: LayerContext,
        *,
        position: nn.Module,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        **more,
    ) -> StackOutput:
        if self.training:
            context.shared[_NOISE] = self.spec.noise_max * (self.passes / self.spec.noise_steps).clamp(max=1.0)
            gate = next((module for module in layers.modules() if isinstance(module, Gates)), None)
            if gate is not None and gate.outer.weight.requires_grad and torch.is_grad_enabled():
                self.passes += 1
        result = super().forward(
            layers,
            hidden_states,
            context,
            position=position,
            memory=memory,
            past_key_values=past_key_values,
            **more,
        )
        opened, total = result.aux_losses.pop(_OPEN, None), result.aux_losses.pop(_ALL, None)
        if opened is not None and total is not None:
            share = opened / total.clamp(min=1)
            result.aux_losses["budget"] = self.spec.budget_weight * (share - self.spec.budget).abs()
        return result


@register("stack", "conditional_computation")
class ConditionalComputationSpec(StackSpec):
    """Layers one after the other, whose sublayers have gates; needs attention and feed-forward 'conditional'.

    budget: p, the share of gates that should be open, 0 < p <= 1. budget_weight: factor on the loss |share - p|.
    gate_size: inner width of a gate's network. gate_bias: G(x) at the start, about (ours). noise_max, noise_steps: alpha grows from 0 to `noise_max` during the first
    `noise_steps` training passes.
    """

    packed = True
    summary = "gates switch sublayers off token by token, within a budget"

    budget: float | int = 0.5
    budget_weight: float | int = 1.0
    gate_size: int = 128
    gate_bias: float | int = 1.0
    noise_max: float | int = 5.0
    noise_steps: int = 10000

    def check_fields(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(
                f"conditional_computation needs 0 < `budget` <= 1 (share of open gates), got {self.budget}."
            )
        if self.budget_weight < 0 or self.noise_max < 0:
            raise ValueError(
                "conditional_computation needs `budget_weight` and `noise_max` of at least 0, got "
                f"{self.budget_weight} and {self.noise_max}."
            )
        if self.gate_size < 1 or self.noise_steps < 1:
            raise ValueError(
                "conditional_computation needs `gate_size` and `noise_steps` of at least 1, got "
                f"{self.gate_size} and {self.noise_steps}."
            )

    def build(self, config, **where) -> ConditionalStack:
        return ConditionalStack(self)


def check_stack(component, config) -> None:
    """Gates need the stack that feeds them."""
    if config.stack.type != "conditional_computation":
        raise ValueError(
            f"{component.slot} 'conditional' has gates that the stack {config.stack.type!r} gives no noise and no budget; "
            "set `stack='conditional_computation'`."
        )
