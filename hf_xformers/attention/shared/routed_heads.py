# SPDX-License-Identifier: Apache-2.0
"""Heads joined by routing: what heads have read votes for the parts of a layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from ...core.components import bounded, check_layers
from ...ops.capsule_routing import agreement_routing, em_routing
from ...ops.common.products import widened
from .head_parts import HeadAggregation

VOTES_AT_ONCE = 1 << 22  # numbers: 16 MiB in float32


class RoutedHeads(nn.Module):
    """u_h = o_h, or with `mixes` act(concat(o) F_h); V_hn = u_h W_hn; the outputs n of routing, side by side.

    Token by token, [..., H * d] -> [..., width]. The votes of a token are as many numbers as H times its output: they
    are made for some tokens at a time, and again in the backward pass. Time O(T H d width) and O(T H width) for each
    iteration.
    """

    def __init__(self, config, spec: RoutedHeadsSpec):
        super().__init__()
        self.spec, self.heads = spec, config.num_attention_heads
        self.capsules, self.width = spec.capsules(config), spec.width(config)
        inner = config.head_width
        self.inputs: nn.Linear | None = None
        if spec.mixes:
            inner = config.hidden_size // self.heads
            self.inputs = nn.Linear(self.heads * config.head_width, self.heads * inner)
            self.activation = ACT2FN[spec.activation]
        self.votes = nn.Parameter(torch.empty(self.heads, inner, self.width))
        expects = spec.routing == "em"
        self.beta_u = nn.Parameter(torch.empty(self.capsules)) if expects else None
        self.beta_a = nn.Parameter(torch.empty(self.capsules)) if expects else None

    def initialize(self, config, init) -> None:
        init.normal_(self.votes, mean=0.0, std=self.votes.shape[1] ** -0.5)
        for beta in (self.beta_u, self.beta_a):
            if beta is not None:
                init.zeros_(beta)

    def forward(self, joined: Tensor) -> Tensor:
        shape = joined.shape[:-1]
        if self.inputs is not None:
            joined = self.activation(self.inputs(joined))
        tokens = joined.reshape(-1, *self.votes.shape[:2])
        at_once = max(VOTES_AT_ONCE // (self.heads * self.width), 1)
        if torch.compiler.is_compiling() or tokens.shape[0] <= at_once:
            return self._routed(tokens).view(*shape, self.width)
        again = torch.is_grad_enabled()
        parts = tokens.split(at_once)
        found = [
            checkpoint(self._routed, part, use_reentrant=False) if again else self._routed(part) for part in parts
        ]
        return torch.cat(found).view(*shape, self.width)

    def _routed(self, tokens: Tensor) -> Tensor:
        """[N, H, u] -> [N, width]."""
        cast = torch.is_autocast_enabled(tokens.device.type)
        votes = torch.matmul(tokens.transpose(0, 1), self.votes.to(tokens.dtype) if cast else self.votes)
        (votes,) = widened(votes.transpose(0, 1).unflatten(-1, (self.capsules, -1)))
        with torch.autocast(tokens.device.type, enabled=False):
            if self.beta_u is not None and self.beta_a is not None:
                beta_u, beta_a = widened(self.beta_u, self.beta_a)
                found = em_routing(votes, self.spec.iterations, beta_u, beta_a, self.spec.em_lambda)
            else:
                found = agreement_routing(votes, self.spec.iterations, self.spec.routing == "dynamic")
        return found.flatten(1).to(tokens.dtype)


class RoutedHeadsSpec(HeadAggregation):
    """Base of aggregations by routing."""

    mixes: bool = False  # whether all heads make each input capsule
    activation: str = "relu"

    routing: str = "simple"
    iterations: int = bounded(3, least=1)
    num_output_capsules: int | None = bounded(None, least=1)
    em_lambda: float | int = bounded(0.01, above=0)
    layers: Literal["lower_half", "all"] | tuple[int, ...] = "all"

    def width(self, config) -> int:
        """Numbers that it gives for a token."""
        return config.num_attention_heads * config.head_width if self.final_linear else config.hidden_size

    def capsules(self, config) -> int:
        """Output capsules."""
        return config.num_attention_heads if self.num_output_capsules is None else self.num_output_capsules

    def chosen(self, config) -> Sequence[int]:
        """The layers whose heads it joins."""
        count = config.num_hidden_layers
        if isinstance(self.layers, str):
            return range(count if self.layers == "all" else -(-count // 2))
        return self.layers

    def check(self, attention, slot: str, config) -> None:
        super().check(attention, slot, config)
        heads, count = config.num_attention_heads, self.capsules(config)
        if self.mixes and config.hidden_size % heads:
            raise ValueError(
                f"{self.type} gives each of {heads} heads an equal part of `hidden_size` {config.hidden_size}; change"
                " one of them so that it divides."
            )
        if self.width(config) % count:
            raise ValueError(
                f"{self.type} divides {self.width(config)} numbers among {count} output capsules, which does not go"
                " out even; give a `num_output_capsules` that divides them."
            )
        check_layers(self, config)

    def build(self, config, *, layer_idx: int) -> RoutedHeads | None:
        return RoutedHeads(config, self) if layer_idx in self.chosen(config) else None
