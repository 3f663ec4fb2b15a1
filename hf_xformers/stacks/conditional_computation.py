# SPDX-License-Identifier: Apache-2.0
"""Conditional computation: a budget for gates that switch sublayers off token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.components import bounded, register
from ..core.gates import ALL, OPEN, GateNoise, Gates
from ..core.hand_overs import HandOver
from .base import StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack


class ConditionalStack(PlainStack):
    """Every layer once, in order; sublayers decide by themselves which tokens they work on.

    In training it gives the noise alpha = noise_max * min(1, t / noise_steps) of training pass t = 0, 1, ... to all
    gates of the tower, and adds the loss |mean of all gates at real tokens - budget|. A pass counts (in the buffer
    `passes`) if gates learn from it: with gradients on, and gates that are not frozen.
    """

    passes: Tensor

    def __init__(self, spec: ConditionalComputationSpec):
        super().__init__()
        self.spec = spec
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def initialize(self, config, init) -> None:
        init.zeros_(self.passes)

    def forward(self, run: Pass) -> StackOutput:
        if self.training:
            alpha = self.spec.noise_max * (self.passes / self.spec.noise_steps).clamp(max=1.0)
            run.context.keep(GateNoise(alpha))
            gate = next(
                (module for layer in run.layers for module in layer.modules() if isinstance(module, Gates)), None
            )
            if gate is not None and gate.outer.weight.requires_grad and torch.is_grad_enabled():
                self.passes += 1
        result = super().forward(run)
        opened, total = result.aux_losses.pop(OPEN, None), result.aux_losses.pop(ALL, None)
        if opened is not None and total is not None:
            share = opened / total.clamp(min=1)
            result.aux_losses["budget"] = self.spec.budget_weight * (share - self.spec.budget).abs()
        return result


@register("stack", "conditional_computation")
class ConditionalComputationSpec(StackSpec):
    """Layers one after the other, whose sublayers have gates; needs attention and feed-forward 'conditional'.

    Args:
        budget: p, the share of gates that should be open, 0 < p <= 1.
        budget_weight: factor on the loss |share - p|.
        gate_size: inner width of a gate's network.
        gate_bias: G(x) at the start, about (ours).
        noise_max, noise_steps: alpha grows from 0 to `noise_max` during the first `noise_steps` training passes.
    """

    gives = frozenset({HandOver.GATE_NOISE})
    supports = frozenset({"packed_rows", "unpadding"})
    summary = "gates switch sublayers off token by token, within a budget"
    unquantized = dict.fromkeys(("query_gate.inner", "gate.inner"), "it opens or closes a part for a token")

    budget: float | int = bounded(0.5, above=0, most=1)
    budget_weight: float | int = 1.0
    gate_size: int = 128
    gate_bias: float | int = 1.0
    noise_max: float | int = 5.0
    noise_steps: int = 10000

    def check_fields(self) -> None:
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
