# SPDX-License-Identifier: Apache-2.0
"""GShard: each token goes to its best expert, and at random to its second best, up to a capacity."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from .base import FeedForward
from .experts import ExpertsSpec, Router, mix
from .routing import balance_loss, documents, groups, real_tokens, within_capacity


class GShardExperts(FeedForward):
    """y = g_1 FFN_{e1}(x) + g_2 FFN_{e2}(x), e1 and e2 the two largest of softmax(W x), g_1 + g_2 = 1.

    Lepikhin et al. 2020 (arXiv 2006.16668), Algorithm 1; a text is a group, or every `group_size` tokens of one. In
    training the second expert is asked with probability min(1, 2 g_2), and an expert takes ceil(factor * tokens / E)
    tokens of a group: those whose first choice it is, in token order, then those whose second. Gates are not scaled up
    for choices that were dropped.
    """

    def __init__(self, config, spec: GShardSpec):
        super().__init__()
        self.spec = spec
        self.causal = config.is_decoder
        self.router = Router(config.hidden_size, spec.num_experts)
        self.experts = spec.make_experts(config)

    def initialize(self, config, init) -> None:
        init.normal_(self.router.weight, mean=0.0, std=config.hidden_size**-0.5)
        self.experts.start(config, init)

    def capacity_factor(self) -> float | None:
        """That of this pass; None: no capacity."""
        if self.causal and not self.spec.decoder_capacity:
            return None
        return self.spec.capacity_factor if self.training else self.spec.eval_capacity_factor

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D], with loss `router_balance` where it has a weight."""
        spec, tokens = self.spec, hidden_states.flatten(0, 1)
        real = real_tokens(hidden_states, context)
        probabilities = torch.softmax(self.router(tokens), -1)
        best, chosen = probabilities.topk(2, dim=-1)
        gates = best / best.sum(-1, keepdim=True)
        asked = chosen
        if self.training and spec.second_expert == "random":
            skipped = torch.rand_like(gates[:, 1]) >= 2 * gates[:, 1]
            asked = torch.stack([chosen[:, 0], chosen[:, 1].masked_fill(skipped, spec.num_experts)], -1)
        factor = self.capacity_factor()
        if factor is None:
            kept = real[:, None] & (asked < spec.num_experts)
        else:
            queues = documents(hidden_states, context)
            if spec.group_size is not None:
                queues = groups(queues, real, spec.group_size)
            priority = best[:, 0] if spec.queue == "probability" else None
            kept = within_capacity(asked, queues, real, spec.num_experts, factor, priority)
        output = mix(self.experts, tokens, asked.masked_fill(~kept, spec.num_experts), gates)
        losses = {}
        if spec.balance_loss_weight:
            losses["router_balance"] = spec.balance_loss_weight * balance_loss(probabilities, chosen[:, 0], real)
        return SublayerOutput(output.view_as(hidden_states), aux_losses=losses)


@register("feedforward", "gshard_moe", aliases=("gshard",))
class GShardSpec(ExpertsSpec):
    """Two experts per token.

    Args:
        second_expert: `random` asks the second with probability min(1, 2 g_2) in training; `all` always does.
        capacity_factor: in training an expert takes ceil(factor * tokens / E) tokens of a text (None: takes all).
        eval_capacity_factor: the same in evaluation.
        decoder_capacity: capacities in a causal tower too, as in the paper. There a second choice waits for the first
            choices of later tokens, so that the future decides what a token reads: off by default.
        group_size: tokens of a text that share queues, S = N / G of section 2.2, the last group being what is left
            (None: the whole text); a group takes ceil(factor * its tokens / E) per expert.
        queue: who comes first, by `position` (the paper), or by the `probability` of the best expert (batch
            prioritized routing: Zoph et al. 2022, arXiv 2202.08906, appendix D).
        balance_loss_weight: weight of E * sum_e f_e m_e over the batch, which is 1 at balance.
    """

    summary = "the best expert, and at random the second"

    every: int = 2
    second_expert: Literal["random", "all"] = "random"
    capacity_factor: float | int | None = 2.0
    eval_capacity_factor: float | int | None = None
    decoder_capacity: bool = False
    group_size: int | None = bounded(None, least=1)
    queue: Literal["position", "probability"] = "position"
    balance_loss_weight: float | int = bounded(0.01, least=0)

    def capacities(self) -> dict[str, float | None]:
        return {"capacity_factor": self.capacity_factor, "eval_capacity_factor": self.eval_capacity_factor}

    def check_fields(self) -> None:
        super().check_fields()
        if self.num_experts < 2:
            raise ValueError(f"{self.type} sends tokens to two experts; `num_experts` must be at least 2.")

    def build_sparse(self, config, layer_idx: int) -> GShardExperts:
        return GShardExperts(config, self)
