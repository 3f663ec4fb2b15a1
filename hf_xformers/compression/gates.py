# SPDX-License-Identifier: Apache-2.0
"""Gates on heads that a training closes (Voita et al. 2019, arXiv 1905.09418, section 6).

Each head has a hard-concrete gate g in [0, 1] with a learned location (Louizos, Welling and Kingma 2018, arXiv
1712.01312, section 2.2):

    s = sigmoid((log u - log(1 - u) + a) / beta),  u ~ U(0, 1);  g = min(1, max(0, s (zeta - gamma) + gamma))

and the loss has lambda times the expected number of open gates next to it, sum_h sigmoid(a_h - beta log(-gamma /
zeta)). Where nothing is trained g is that of s = sigmoid(a).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.losses import step_share, with_aux_losses
from ..core.weight_decay import Undecayed
from .head_pruning import HeadLayer, Kept, times_gates

BETA, GAMMA, ZETA = 0.33, -0.1, 1.1  # the paper's released code
_START = 2.0  # a: nearly all gates are open
_NAME = "head_gates"


class HeadGates(Undecayed, nn.Module):
    """The gates of the heads of one attention. speed: how much faster than weights they learn: the parameter is a /
    speed, and the steps of Adam are free of scale."""

    undecayed = ("location",)

    def __init__(self, heads: int, speed: float = 1.0):
        super().__init__()
        self.speed = speed
        self.location = nn.Parameter(torch.full((heads,), _START / speed))

    @property
    def a(self) -> Tensor:
        return self.location.float() * self.speed

    def sampled(self) -> Tensor:
        """[H], one draw."""
        u = torch.rand_like(self.a).clamp(1e-6, 1 - 1e-6)
        return _stretched(torch.sigmoid((u.log() - (1 - u).log() + self.a) / BETA))

    def settled(self) -> Tensor:
        """[H], as they are outside training."""
        return _stretched(torch.sigmoid(self.a))

    def open_gates(self) -> Tensor:
        """The expected number of gates that are not 0."""
        return torch.sigmoid(self.a - BETA * math.log(-GAMMA / ZETA)).sum()

    def forward(self, joined: Tensor) -> Tensor:
        """[B, ..., H * d] -> the same, each head times its gate."""
        return times_gates(joined, self.sampled() if self.training else self.settled())


def _stretched(s: Tensor) -> Tensor:
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


class GatedHeads:
    """Gates on all heads of a model while it is trained, and the penalty in its loss.

    weight: lambda, for the share of gates that are open (so that it means the same at any size).
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[HeadLayer], weight: float, speed: float):
        self.model, self.layers, self.weight = model, layers, weight
        self.handles: list[Any] = []
        for layer in layers:
            for module in layer.modules:
                gates = HeadGates(layer.heads, speed).to(model.device).train(module.training)
                module.o_proj.add_module(_NAME, gates)
                self.handles.append(module.o_proj.register_forward_pre_hook(_gate))
        self.handles.append(model.register_forward_hook(self._add_penalty, with_kwargs=True))

    def gates(self) -> list[list[HeadGates]]:
        """By layer, those of its attentions."""
        return [[getattr(module.o_proj, _NAME) for module in layer.modules] for layer in self.layers]

    def penalty(self) -> Tensor:
        """The expected share of open gates."""
        found = [gate for gates in self.gates() for gate in gates]
        return torch.stack([gate.open_gates() for gate in found]).sum() / sum(g.location.numel() for g in found)

    def _add_penalty(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        loss = getattr(output, "loss", None)
        if not self.model.training:
            return output
        if loss is None:  # made of the logits elsewhere, as with class weights: the trainer adds auxiliary losses
            output["aux_losses"] = {**(output.get("aux_losses") or {}), _NAME: self.weight * self.penalty()}
            return output
        causal = getattr(module, "loss_type", None) == "ForCausalLM"
        share = step_share(kwargs.get("labels"), kwargs.get("num_items_in_batch"), shifted=causal)
        output.loss = with_aux_losses(loss, {_NAME: self.weight * self.penalty().to(loss.dtype)}, share)
        return output

    def open_heads(self) -> Kept:
        """The heads whose gates are not closed; of a layer without any the one that is most open, of heads that leave
        together all where one is open."""
        kept: Kept = {}
        for layer, gates in zip(self.layers, self.gates()):
            together = [gate.a.detach().unflatten(0, (layer.units, layer.unit)).amax(-1) for gate in gates]
            shut = _stretched(torch.sigmoid(torch.stack(together))) <= 0
            left = max(1, int((~shut).sum(-1).max()))  # as many of each attention of the layer
            orders = [row.argsort(descending=True, stable=True) for row in together]
            kept[layer.key] = [layer.heads_of(order[:left].tolist()) for order in orders]
        return kept

    @torch.no_grad()
    def fold(self) -> None:
        """Takes the gates off, and multiplies the columns of the output projections by what they were."""
        for layer, gates in zip(self.layers, self.gates()):
            for module, gate in zip(layer.modules, gates):
                weight = module.o_proj.weight
                weight.copy_(times_gates(weight, gate.settled()))
                del module.o_proj._modules[_NAME]
        for handle in self.handles:
            handle.remove()


def _gate(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (getattr(module, _NAME)(args[0]), *args[1:])
