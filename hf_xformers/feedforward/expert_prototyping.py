# SPDX-License-Identifier: Apache-2.0
"""Expert prototyping: experts in groups, each token goes to the best of every group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.call import Call, SublayerOutput
from ..core.components import aliased, bounded, register
from .base import FeedForward
from .experts import ExpertsSpec, Router, mix
from .routing import balance_loss, documents, real_tokens, within_capacity


class PrototypedExperts(FeedForward):
    """y = sum_z p^z_{i_z} FFN^z_{i_z}(x) over k prototypes of E / k experts: p^z = softmax(W^z x), i_z = argmax p^z.

    Yang et al. 2021 (arXiv 2105.15082), section 3.3 ("k top-1"). Gates of different prototypes do not compete.
    """

    def __init__(self, config, spec: ExpertPrototypingSpec):
        super().__init__()
        self.spec = spec
        self.router = Router(config.hidden_size, spec.num_experts)  # all prototypes' routers in one product
        self.experts = spec.make_experts(config)

    def initialize(self, config, init) -> None:
        init.normal_(self.router.weight, mean=0.0, std=config.hidden_size**-0.5)
        self.experts.start(config, init)

    def capacity_factor(self) -> float | None:
        """Tokens of a text that an expert takes are ceil(this * tokens / E); None: all."""
        factor = self.spec.capacity_factor if self.training else self.spec.eval_capacity_factor
        if factor is None or self.spec.prototype_capacity == "1x":
            return factor
        return factor * self.spec.num_prototypes

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D], with loss `router_balance` where it has a weight."""
        spec, tokens = self.spec, hidden_states.flatten(0, 1)
        real = real_tokens(hidden_states, context)
        size = spec.num_experts // spec.num_prototypes
        probabilities = torch.softmax(self.router(tokens).unflatten(-1, (spec.num_prototypes, size)), -1)
        gates, inside = probabilities.max(-1)
        chosen = inside + torch.arange(0, spec.num_experts, size, device=inside.device)
        texts = documents(hidden_states, context)
        kept = within_capacity(chosen, texts, real, spec.num_experts, self.capacity_factor())
        output = mix(self.experts, tokens, chosen.masked_fill(~kept, spec.num_experts), gates)
        losses = {}
        if spec.balance_loss_weight:
            parts = [balance_loss(probabilities[:, z], inside[:, z], real) for z in range(spec.num_prototypes)]
            losses["router_balance"] = spec.balance_loss_weight * torch.stack(parts).sum()
        return SublayerOutput(output.view_as(hidden_states), aux_losses=losses)


@register("feedforward", "expert_prototyping", aliases=("k_top1",))
class ExpertPrototypingSpec(ExpertsSpec):
    """One expert of each prototype per token.

    Args:
        num_prototypes: k, divides `num_experts`.
        prototype_capacity: units of the capacity, `1x` for tokens / E (the cost of one expert per token), `kx` for k *
            tokens / E.
        capacity_factor: of an expert in training, per text, in those units; None: no capacity.
        eval_capacity_factor: the same in evaluation.
        balance_loss_weight: weight of the Switch balance loss of each prototype (the paper finds that it hardly
            matters).
    """

    summary = "one expert of each of several groups"

    every: int = 2
    num_prototypes: int = aliased(2, "prototypes")
    prototype_capacity: Literal["1x", "kx"] = "1x"
    capacity_factor: float | int | None = 1.25
    eval_capacity_factor: float | int | None = None
    balance_loss_weight: float | int = bounded(0.01, least=0)

    def capacities(self) -> dict[str, float | None]:
        return {"capacity_factor": self.capacity_factor, "eval_capacity_factor": self.eval_capacity_factor}

    def check_fields(self) -> None:
        super().check_fields()
        if self.num_prototypes < 1 or self.num_experts % self.num_prototypes:
            raise ValueError(
                f"{self.type}: `num_prototypes` {self.num_prototypes} must divide `num_experts` {self.num_experts}."
            )

    def build_sparse(self, config, layer_idx: int) -> PrototypedExperts:
        return PrototypedExperts(config, self)
