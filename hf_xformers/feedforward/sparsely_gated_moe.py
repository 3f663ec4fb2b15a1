# SPDX-License-Identifier: Apache-2.0
"""The sparsely-gated mixture of experts: noisy top-k gating with losses on importance and load."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from .base import FeedForward
from .experts import ExpertsSpec, Router, mix
from .routing import mean_over, real_tokens


def squared_variation(values: Tensor) -> Tensor:
    """(standard deviation / mean)^2 of non-negative numbers; 0 where all are 0."""
    return values.var(correction=0) / values.mean().square().clamp(min=1e-10)


class SparselyGatedExperts(FeedForward):
    """y = sum_e G(x)_e FFN_e(x), G(x) = softmax over the k largest of x W_g + n * softplus(x W_n), n normal.

    Shazeer et al. 2017 (arXiv 1701.06538), eqs. 1-5 and appendix A. The noise is there in training only. No expert has
    a capacity, so a token's output depends on itself alone.
    """

    def __init__(self, config, spec: SparselyGatedSpec):
        super().__init__()
        self.spec = spec
        self.router = Router(config.hidden_size, spec.num_experts)
        self.noise = Router(config.hidden_size, spec.num_experts) if spec.noise else None
        self.experts = spec.make_experts(config)

    def initialize(self, config, init) -> None:
        init.zeros_(self.router.weight)
        if self.noise is not None:
            init.zeros_(self.noise.weight)
        self.experts.start(config, init)

    def load(self, clean: Tensor, noisy: Tensor, spread: Tensor | None, chosen: Tensor) -> Tensor:
        """[N, E]: the probability that the expert is chosen when its own noise is drawn again (appendix A, eq. 9); in
        a model without noise, whether it is chosen."""
        k, total = self.spec.resolved_topk, self.spec.num_experts
        taken = torch.zeros_like(clean).scatter(1, chosen, 1.0)
        if spread is None or k == total:
            return taken
        best = noisy.topk(k + 1, dim=-1).values
        # The k-th largest of the others: for one of the chosen, the first that was not.
        limit = torch.where(taken.bool(), best[:, k:], best[:, k - 1 : k])
        return torch.special.ndtr((clean - limit) / spread)

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D], with losses `router_importance` and `router_load` where they have a
        weight."""
        spec, tokens = self.spec, hidden_states.flatten(0, 1)
        real = real_tokens(hidden_states, context)
        clean = noisy = self.router(tokens)
        spread = None
        if self.noise is not None:
            spread = F.softplus(self.noise(tokens)).clamp(min=1e-9)
            if self.training:
                noisy = clean + torch.randn_like(clean) * spread
        best, chosen = noisy.topk(spec.resolved_topk, dim=-1)
        gates = torch.softmax(best, -1)
        nowhere = ~real[:, None].expand_as(chosen)
        output = mix(self.experts, tokens, chosen.masked_fill(nowhere, spec.num_experts), gates)
        losses = {}
        if spec.importance_loss_weight:
            importance = mean_over(torch.zeros_like(clean).scatter(1, chosen, gates), real)
            losses["router_importance"] = spec.importance_loss_weight * squared_variation(importance)
        if spec.load_loss_weight:
            load = mean_over(self.load(clean, noisy, spread, chosen), real)
            losses["router_load"] = spec.load_loss_weight * squared_variation(load)
        return SublayerOutput(output.view_as(hidden_states), aux_losses=losses)


@register("feedforward", "sparsely_gated_moe", aliases=("noisy_topk_moe",))
class SparselyGatedSpec(ExpertsSpec):
    """k experts per token.

    Args:
        topk: k (`None`: half of the experts, at most the paper's 4).
        noise: learned noise on the gates in training.
        importance_loss_weight: on the squared variation of the experts' summed gates.
        load_loss_weight: on that of their expected numbers of tokens.
    """

    summary = "the best k of many experts, by noisy gates"

    every: int = 2
    topk: int | None = None
    noise: bool = True
    importance_loss_weight: float | int = bounded(0.1, least=0)
    load_loss_weight: float | int = bounded(0.1, least=0)

    @property
    def resolved_topk(self) -> int:
        """k."""
        return min(self.num_experts, 4, max(self.num_experts // 2, 2)) if self.topk is None else self.topk

    def check_fields(self) -> None:
        super().check_fields()
        if self.topk is not None and not 1 <= self.topk <= self.num_experts:
            raise ValueError(f"{self.type}: `topk` must be in [1, {self.num_experts}] (the experts), got {self.topk}.")
        if self.resolved_topk == 1 and self.num_experts > 1:
            raise ValueError(
                f"{self.type}: with `topk` 1 the only gate is always 1 and the task cannot teach the router; take at"
                " least 2, or feedforward 'switch_transformer'."
            )

    def build_sparse(self, config, layer_idx: int) -> SparselyGatedExperts:
        return SparselyGatedExperts(config, self)
