# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a state space whose state decays by a time step of each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.precision import Float32Module
from ..core.weight_decay import Undecayed
from .shared.recurrent import DecayRates, GatedNorm, RecurrentAttention, RecurrentSpec, Tokens

PARTS = ("gate", "v", "k", "q", "step")  # of what projections give, in the order of `part_scales`


class Skip(Undecayed, Float32Module):
    """D_h x: what goes past the state, with a number for each head."""

    undecayed = ("D",)

    def __init__(self, heads: int):
        super().__init__()
        self.D = nn.Parameter(torch.empty(heads))

    def initialize(self, config, init) -> None:
        init.ones_(self.D)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H, dv] -> the same, in float32 at least."""
        return self.D[:, None] * x.to(torch.promote_types(self.D.dtype, x.dtype))


class Mamba2Attention(RecurrentAttention):
    """S_t = exp(-A d_t) S_{t-1} + B_t (d_t x_t)^T,   y_t = W_o RMSNorm((S_t^T C_t + D x_t) SiLU(W_z u_t)).

    Dao and Gu 2024 (arXiv 2405.21060), sections 3 and 7: C, B and x, which are queries, keys and values, are SiLU of a
    causal convolution over projections of u; d = softplus(W_d u + dt_bias) is the time step of a head, and A =
    exp(A_log) and D are numbers of it. Heads of x may share B and C: `key_heads` is the number G of their groups,
    `key_width` the paper's N and `value_width` its P. There is no scale. The norm is one of each group, behind the
    gate.

    The weights given out are those of d_t x_t, without D.
    """

    spec: Mamba2Spec
    conv_bias = True
    conv_order = "vkq"

    def __init__(self, config, spec: Mamba2Spec, **where):
        super().__init__(config, spec, **where)
        self.decay_proj = nn.Linear(config.hidden_size, self.num_heads, bias=spec.bias)
        self.gate_proj = nn.Linear(config.hidden_size, self.inner_width, bias=spec.bias)
        self.decay, self.skip = DecayRates(self.num_heads, rates=(1.0, 16.0)), Skip(self.num_heads)
        self.output_norm: GatedNorm | None = None
        if spec.gate_norm != "none":
            groups, first = spec.heads(config)[1], spec.gate_norm == "gate_first"
            self.output_norm = GatedNorm(self.inner_width, spec.eps(config), groups=groups, gate_first=first)

    def scaled(self, name: str, projected: Tensor) -> Tensor:
        """A part of what projections give as `part_scales` has it."""
        scales = self.spec.part_scales
        return projected if scales is None else projected * scales[PARTS.index(name)]

    def part_projections(self, hidden_states: Tensor) -> list[Tensor]:
        return [
            self.scaled(name, part) for name, part in zip("qkv", super().part_projections(hidden_states), strict=True)
        ]

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        query, key, value, window = self.query_key_value(hidden_states, context, window)
        step = self.scaled("step", self.decay_proj(hidden_states))
        log_decay, step = self.decay(step, self.spec.least_step, self.spec.most_step)
        weighed = value * step[..., None]
        weighed = weighed if value.dtype == torch.float16 else weighed.to(value.dtype)
        return Tokens(query, key, weighed, log_decay, passed=value), window

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        assert tokens.passed is not None and self.gate_proj is not None
        found = (output + self.skip(tokens.passed.transpose(1, 2))).flatten(2)
        gate = self.scaled("gate", self.gate_proj(hidden_states))
        return found * F.silu(gate) if self.output_norm is None else self.output_norm(found, gate)


@register("attention", "mamba2", aliases=("ssd",))
class Mamba2Spec(RecurrentSpec):
    """
    Args:
        key_heads: groups of heads that share B and C (the paper: 1), with as many values as the config has heads;
            `None`: queries, keys and values as attention has them, with keys and values of `num_key_value_heads`
            heads.
        value_heads: heads of values, if others.
        key_width, value_width: of a head (the paper: 128 and 64; `None`: the config's).
        conv: taps of the short convolution (0: none).
        least_step, most_step: between which time steps are kept.
        gate_norm: the norm of the output behind the gate (`gate_first`), before it (`norm_first`), or `none`.
        norm_eps: of that norm (`None`: the config's).
        part_scales: what the projected gate, x, B, C and time step are multiplied with (`None`: nothing; Falcon-H1).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "a state space with a scalar decay of each token: linear time, short convolutions"
    scales = False
    turns = False
    gives = frozenset({HandOver.TOKEN_MAP})  # layers need no feed-forward

    conv: int = bounded(4, least=0)
    least_step: float | int = bounded(0.0, least=0)
    most_step: float | int | None = bounded(None, above=0)
    gate_norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    part_scales: tuple[float, ...] | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.part_scales is not None and len(self.part_scales) != len(PARTS):
            raise ValueError(
                f"mamba2 has `part_scales` of {len(PARTS)} parts (gate, x, B, C and time step), got"
                f" {self.part_scales!r}; give as many numbers, or None."
            )

    def build(self, config, **where) -> Mamba2Attention:
        return Mamba2Attention(config, self, **where)
