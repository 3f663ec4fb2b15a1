# SPDX-License-Identifier: Apache-2.0
"""Switch Transformer: each token goes to one expert, up to a capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from .base import FeedForward
from .experts import ExpertsSpec, Router, mix
from .routing import balance_loss, documents, real_tokens, within_capacity, z_loss


class SwitchFeedForward(FeedForward):
    """y = p_i FFN_i(x) with p = softmax(W_r x) and i = argmax p; 0 where expert i is full.

    Fedus et al. 2022 (arXiv 2101.03961), eqs. 1-2, section 2.2. An expert takes, of each text, its first
    ceil(factor * tokens / E) tokens that chose it, and no more than `expert_capacity`, so an output depends neither on
    other rows nor on later tokens' contents.
    """

    def __init__(self, config, spec: SwitchSpec):
        super().__init__()
        self.spec = spec
        self.router = Router(config.hidden_size, spec.num_experts, float(spec.jitter))
        self.experts = spec.make_experts(config)

    def initialize(self, config, init) -> None:
        scale = self.spec.init_scale
        std = (scale / config.hidden_size) ** 0.5
        init.trunc_normal_(self.router.weight, mean=0.0, std=std, a=-2 * std, b=2 * std)
        self.experts.start(config, init, scale=scale)

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D], with losses `router_balance` and `router_z` where they have a
        weight."""
        spec, tokens = self.spec, hidden_states.flatten(0, 1)
        real = real_tokens(hidden_states, context)
        logits = self.router(tokens)
        probabilities = torch.softmax(logits, -1)
        gate, chosen = probabilities.max(-1, keepdim=True)
        factor = spec.capacity_factor if self.training else spec.eval_capacity_factor
        texts = documents(hidden_states, context)
        kept = within_capacity(chosen, texts, real, spec.num_experts, factor, limit=spec.expert_capacity)
        output = mix(self.experts, tokens, chosen.masked_fill(~kept, spec.num_experts), gate)
        losses = {}
        if spec.balance_loss_weight:
            losses["router_balance"] = spec.balance_loss_weight * balance_loss(probabilities, chosen[:, 0], real)
        if spec.z_loss_weight:
            losses["router_z"] = spec.z_loss_weight * z_loss(logits, real)
        return SublayerOutput(output.view_as(hidden_states), aux_losses=losses)


@register("feedforward", "switch_transformer", aliases=("switch",))
class SwitchSpec(ExpertsSpec):
    """One expert per token.

    Args:
        capacity_factor: in training an expert takes ceil(factor * tokens / E) tokens of a text and drops the rest,
            which then pass by on the residual alone (None: takes all).
        eval_capacity_factor: the same in evaluation; the paper's 2.0 makes an output depend on the text's length, so
            that generation token by token would differ from a pass over the whole text.
        expert_capacity: a number of tokens of a text that an expert takes at most in one call, whatever the text's
            length, in training and evaluation (transformers' Switch models; None: no such bound).
        jitter: relative noise on the router's input in training.
        balance_loss_weight: alpha.
        z_loss_weight: weight of the squared log-partition (Zoph et al. 2022: 1e-3).
        init_scale: s, weights start truncated normal with variance s / fan in.
    """

    summary = "each token goes to one of many experts"

    every: int = 2
    capacity_factor: float | int | None = 1.25
    eval_capacity_factor: float | int | None = None
    expert_capacity: int | None = None
    jitter: float | int = bounded(0.01, least=0, below=1)
    balance_loss_weight: float | int = bounded(0.01, least=0)
    z_loss_weight: float | int = bounded(0.0, least=0)
    init_scale: float | int = bounded(0.1, above=0)

    def capacities(self) -> dict[str, float | None]:
        return {
            "capacity_factor": self.capacity_factor,
            "eval_capacity_factor": self.eval_capacity_factor,
            "expert_capacity": self.expert_capacity,
        }

    def build_sparse(self, config, layer_idx: int) -> SwitchFeedForward:
        return SwitchFeedForward(config, self)
