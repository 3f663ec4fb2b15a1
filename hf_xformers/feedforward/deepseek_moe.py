# SPDX-License-Identifier: Apache-2.0
"""Many small gated experts next to a shared one, as DeepSeek, Mixtral, Qwen and GPT-OSS have them."""

from __future__ import annotations

import copy
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..core.after_step import StepFollower
from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.distributed import sum_over_processes
from ..core.precision import Float32Module
from .base import FeedForward
from .dense import DenseFeedForward
from .experts import Experts, ExpertsSpec, Router, mix
from .routing import mean_over, real_tokens


class Gate(nn.Module):
    """act(g) * u of g and u side by side, [..., 2 F] -> [..., F]; with a limit l GPT-OSS's form (OpenAI 2025, released
    code), g' sigmoid(alpha g') (u' + 1) with g' = min(g, l) and u' = u within [-l, l]."""

    def __init__(self, spec: DeepSeekSpec):
        super().__init__()
        self.activation, self.limit, self.alpha = ACT2FN[spec.activation], spec.limit, spec.alpha

    def forward(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        if self.limit is None:
            return self.activation(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


class Balance(Float32Module, StepFollower):
    """b_e, which is added to the scores by which experts are chosen and not to those by which they are weighed; after
    each step b_e <- b_e + u sign(mean load - load_e), with the loads of all processes and batches of the step (Wang et
    al. 2024, arXiv 2408.15664, Algorithm 1). No gradient reaches it.

    Activation checkpointing counts a layer's tokens twice, all of them alike, which changes no sign.
    """

    bias: Tensor
    loads: Tensor | None  # no buffer: DDP would give all processes those of the first

    def __init__(self, router: Router, rate: float):
        super().__init__()
        self.rate, self.loads = rate, None
        self.routers = (router,)  # whose child this is not
        self.register_buffer("bias", torch.zeros(router.weight.shape[0], dtype=torch.float32))

    def initialize(self, config, init) -> None:
        init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        """Scores [N, E] -> the same with b."""
        return scores + self.bias.to(scores.dtype)

    def leader(self) -> nn.Parameter | None:
        return None if self.loads is None else self.routers[0].weight

    def count(self, chosen: Tensor, real: Tensor) -> None:
        """Adds the real tokens [N] of a training pass to the loads of the experts that they chose [N, k]. A router
        that is frozen, as under adapters, keeps its bias."""
        if not (self.training and self.rate and torch.is_grad_enabled() and self.routers[0].weight.requires_grad):
            return
        many = real[:, None].expand_as(chosen).reshape(-1).to(self.bias.dtype)
        loads = torch.zeros_like(self.bias).scatter_add(0, chosen.reshape(-1), many)
        self.loads = loads if self.loads is None else self.loads + loads

    def after_step(self) -> None:
        assert self.loads is not None
        loads, self.loads = sum_over_processes(self.loads), None
        self.bias += self.rate * torch.sign(loads.mean() - loads)


class DeepSeekExperts(FeedForward):
    """y = shared(x) + c sum_{e in chosen} w_e FFN_e(x), FFN_e(x) = W_down[e] (act(W_gate[e] x) * W_up[e] x).

    Dai et al. 2024 (arXiv 2401.06066), eqs. 3-10; DeepSeek-AI 2024 (arXiv 2412.19437), eqs. 12-16. Scores s are the
    sigmoid or the softmax of W_r x, in float32 at least; the k experts of the largest s + b are chosen, in those
    groups alone whose best experts are best; w_e = s_e, or s_e / sum_chosen s. No expert has a capacity, so a token's
    output depends on itself alone. The shared network is always asked, and may be gated by sigmoid(w_s x).
    """

    def __init__(self, config, spec: DeepSeekSpec):
        super().__init__()
        self.spec = spec
        self.router = Router(config.hidden_size, spec.num_experts, bias=spec.router_bias)
        self.balance = None if spec.balance_rate is None else Balance(self.router, float(spec.balance_rate))
        self.experts = spec.make_experts(config)
        self.shared: DenseFeedForward | None = None
        if spec.shared_size is not None:
            narrow = copy.copy(config)
            narrow.intermediate_size = spec.shared_size
            self.shared = DenseFeedForward(narrow, spec)
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False) if spec.shared_gate else None

    def initialize(self, config, init) -> None:
        init.normal_(self.router.weight, mean=0.0, std=config.initializer_range)
        if self.router.bias is not None:
            init.zeros_(self.router.bias)
        self.experts.start(config, init)

    def choose(self, scores: Tensor) -> Tensor:
        """Scores [N, E] -> the numbers of k experts [N, k]."""
        spec = self.spec
        if self.balance is not None:
            scores = self.balance(scores)
        if spec.groups > 1:
            grouped = scores.unflatten(-1, (spec.groups, -1))
            of_groups = grouped.topk(2, dim=-1).values.sum(-1) if spec.group_score == "two" else grouped.amax(-1)
            best = of_groups.topk(spec.kept_groups, dim=-1).indices
            kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, best, True)
            scores = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        return scores.topk(spec.topk, dim=-1).indices

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D], with the loss `router_balance` where it has a weight."""
        spec, tokens = self.spec, hidden_states.flatten(0, 1)
        real = real_tokens(hidden_states, context)
        logits = self.router(tokens)
        scores = torch.sigmoid(logits) if spec.scores == "sigmoid" else torch.softmax(logits, -1)
        chosen = self.choose(scores.detach())
        if self.balance is not None:
            self.balance.count(chosen, real)
        gates = scores.gather(-1, chosen)
        if spec.normalize:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        output = mix(self.experts, tokens, chosen.masked_fill(~real[:, None], spec.num_experts), gates * spec.scale)
        output = output.view_as(hidden_states)
        if self.shared is not None:
            shared = self.shared.transform(hidden_states)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(hidden_states)) * shared
            output = output + shared
        losses = {}
        if spec.balance_loss_weight:
            share = mean_over(torch.zeros_like(scores).scatter(-1, chosen, 1.0 / spec.topk), real)
            probability = mean_over(scores / (scores.sum(-1, keepdim=True) + 1e-20), real)
            losses["router_balance"] = spec.balance_loss_weight * spec.num_experts * (share * probability).sum()
        return SublayerOutput(output, aux_losses=losses)


@register("feedforward", "deepseek_moe", aliases=("gated_experts",))
class DeepSeekSpec(ExpertsSpec):
    """k of many gated experts per token, and one that all tokens share.

    Args:
        topk: k.
        expert_size: inner width of an expert (`None`: `intermediate_size`).
        shared_size: inner width of the shared network (`None`: there is none).
        shared_gate: a sigmoid gates the shared network (Qwen).
        scores: `sigmoid` (DeepSeek-V3) or `softmax`.
        normalize: the weights of the chosen experts sum to 1; with `softmax` this is the softmax over the chosen
            (Mixtral, GPT-OSS).
        scale: c.
        groups: of equal numbers of experts.
        kept_groups: how many groups can be chosen from.
        group_score: groups are kept by their `best` expert (DeepSeek-V2) or by the sum of their `two` best (V3).
        router_bias: logits of the router have a bias (GPT-OSS).
        balance_rate: u, by which the biases of chosen experts move in training (`None`: there are none; 0: they stay
            as they are, as at the end of a training).
        balance_loss_weight: weight of E * sum_e f_e P_e over the batch, which is 1 at balance.
        limit: l, with which experts have GPT-OSS's form (`None`: the usual one).
        alpha: factor inside its sigmoid.
    """

    summary = "the best k of many gated experts, and a shared one"
    gated: ClassVar[bool] = True

    activation: str = "silu"
    topk: int = bounded(2, least=1)
    expert_size: int | None = bounded(None, least=1)
    shared_size: int | None = bounded(None, least=1)
    shared_gate: bool = False
    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    normalize: bool = True
    scale: float | int = bounded(1.0, above=0)
    groups: int = bounded(1, least=1)
    kept_groups: int = bounded(1, least=1)
    group_score: Literal["best", "two"] = "two"
    router_bias: bool = False
    balance_rate: float | int | None = bounded(0.001, least=0)
    balance_loss_weight: float | int = bounded(0.0, least=0)
    limit: float | int | None = bounded(None, above=0)
    alpha: float | int = bounded(1.702, above=0)

    def check_fields(self) -> None:
        super().check_fields()
        size = self.num_experts // self.groups
        if self.num_experts % self.groups or self.kept_groups > self.groups:
            raise ValueError(
                f"{self.type}: `num_experts` {self.num_experts} must be whole `groups`, of which `kept_groups` are at"
                f" most all, got {self.groups} and {self.kept_groups}."
            )
        if self.groups > 1 and self.group_score == "two" and size < 2:
            raise ValueError(
                f"{self.type}: groups of {size} expert have no two best; use `group_score='best'`, or fewer groups."
            )
        if self.topk > self.kept_groups * size:
            raise ValueError(
                f"{self.type}: `topk` {self.topk} is more than the {self.kept_groups * size} experts of these groups;"
                " lower it, or keep more groups."
            )
        if self.shared_gate and self.shared_size is None:
            raise ValueError(f"{self.type}: `shared_gate` gates a shared network; give it a `shared_size`.")

    def make_experts(self, config, num_experts: int | None = None) -> Experts:
        return Experts(
            self.num_experts if num_experts is None else num_experts,
            config.hidden_size,
            config.intermediate_size if self.expert_size is None else self.expert_size,
            activation=self.activation,
            bias=self.bias,
            dropout=self.inner_dropout(config),
            gate=Gate(self),
        )

    def build_sparse(self, config, layer_idx: int) -> DeepSeekExperts:
        return DeepSeekExperts(config, self)
