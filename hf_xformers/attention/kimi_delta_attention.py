# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: the gated delta rule with a decay for every channel of a key."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.components import bounded, register
from .gated_delta_net import GatedDeltaNetAttention, GatedDeltaNetSpec
from .shared.recurrent import DecayRates, GatedNorm, Tokens


class KimiDeltaAttention(GatedDeltaNetAttention):
    """S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T,   y_t = W_o [RMSNorm(S_t^T q_t / sqrt(K))
    sigmoid(W_g x_t)].

    Kimi Team 2025 (arXiv 2510.26692), section 3: as [`GatedDeltaNetAttention`], but the state of every channel of a
    key decays by a rate of its own, a = exp(-exp(A_log) softplus(W_up W_down x + dt_bias)), and a sigmoid lets the
    output through. Both gates are of low rank (`gate_rank`).
    """

    spec: KimiDeltaSpec

    def make_gates(self, config) -> None:
        width, rank = config.hidden_size, self.spec.gate_rank or self.key_width
        self.decay_down_proj = nn.Linear(width, rank, bias=False)
        self.decay_up_proj = nn.Linear(rank, self.num_heads * self.key_width, bias=False)
        self.decay = DecayRates(self.num_heads, self.key_width, rates=(1.0, 16.0))
        self.gate_down_proj = nn.Linear(width, rank, bias=False)
        self.gate_up_proj = nn.Linear(rank, self.inner_width, bias=False)
        eps = self.spec.eps(config)
        self.output_norm = GatedNorm(self.inner_width, eps, groups=self.num_heads, shared=True, gate="sigmoid")

    def log_decay(self, hidden_states: Tensor) -> Tensor:
        return self.decay(self.decay_up_proj(self.decay_down_proj(hidden_states)))[0]

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        return self.output_norm(output.flatten(2), self.gate_up_proj(self.gate_down_proj(hidden_states)))


@register("attention", "kimi_delta_attention", aliases=("kda",))
class KimiDeltaSpec(GatedDeltaNetSpec):
    """
    Args:
        key_heads, value_heads: how many heads queries and keys have, and how many values; `None`: as attention with
            keys and values of `num_key_value_heads` heads.
        key_width, value_width: of a head (`None`: the config's).
        conv: taps of the short convolution (0: none).
        negative: strengths of writing up to 2.
        num_householder: how often a token corrects the state.
        gate_rank: inner width of both gates (`None`: that of a head's keys).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "the gated delta rule with a decay for every channel of a key"

    gate_rank: int | None = bounded(None, least=1)

    def build(self, config, **where) -> KimiDeltaAttention:
        return KimiDeltaAttention(config, self, **where)
