# SPDX-License-Identifier: Apache-2.0
"""Gated delta networks: the delta rule with a state that decays."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.products import widened
from .shared.recurrent import DecayRates, GatedNorm, RecurrentAttention, RecurrentSpec, Tokens, unit_length


class GatedDeltaNetAttention(RecurrentAttention):
    """S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   y_t = W_o [RMSNorm(S_t^T q_t / sqrt(K)) SiLU(W_z
    x_t)].

    Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464), section 3.4: q, k and v are SiLU of a causal convolution of
    `conv` taps over projections; q and k have length 1; beta = sigmoid(W_b x), and a = exp(-exp(A_log) softplus(W_a x
    + dt_bias)), a number of each head. As in Qwen3-Next and Qwen3.5, heads of values may be more than heads of queries
    and keys, each of which then serves several.

    With `negative` beta is twice as large, and the transition may have negative eigenvalues (Grazzi et al. 2024, arXiv
    2411.12537; OLMo-Hybrid).

    With `num_householder` n, a token decays the state once and corrects it n times, S <- (I - beta_j k_j k_j^T) S +
    beta_j k_j v_j^T for j = 1 .. n, each with a key, a value and a strength of its own, before it is read
    (DeltaProduct: Siems et al. 2025, arXiv 2502.10297, section 3.1). That is the recurrence of a text of n T tokens.
    """

    spec: GatedDeltaNetSpec

    def __init__(self, config, spec: GatedDeltaNetSpec, **where):
        super().__init__(config, spec, **where)
        self.beta_proj = nn.Linear(config.hidden_size, spec.writes * self.num_heads, bias=False)
        self.make_gates(config)

    def make_gates(self, config) -> None:
        """What decays are made of, and what of the output is let through."""
        self.decay_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.decay = DecayRates(self.num_heads)
        self.gate_proj = nn.Linear(config.hidden_size, self.inner_width, bias=False)
        self.output_norm = GatedNorm(self.inner_width, self.spec.eps(config), groups=self.num_heads, shared=True)

    def log_decay(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T] or [B, H, T, K]"""
        return self.decay(self.decay_proj(hidden_states))[0]

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        query, key, value, window = self.query_key_value(hidden_states, context, window)
        query, key = self.turned(unit_length(query) * self.scaling, unit_length(key), context)
        (strength,) = widened(self.beta_proj(hidden_states))  # whose gradients may leave float16's range
        writes, log_decay = self.spec.writes, self.log_decay(hidden_states)
        beta = torch.sigmoid(strength).unflatten(-1, (writes, -1)).flatten(1, 2).transpose(1, 2)
        beta = 2 * beta if self.spec.negative else beta
        if writes > 1:  # the state decays at the first step of a token, and is read at its last
            query = F.pad(query[:, :, :, None], (0, 0, writes - 1, 0)).flatten(2, 3)
            channels = (0, 0) * (log_decay.ndim - 3)
            log_decay = F.pad(log_decay.unsqueeze(3), (*channels, 0, writes - 1)).flatten(2, 3)
        return Tokens(query, key, value, log_decay, beta), window

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        assert self.gate_proj is not None
        return self.output_norm(output.flatten(2), self.gate_proj(hidden_states))


@register("attention", "gated_delta_net")
class GatedDeltaNetSpec(RecurrentSpec):
    """
    Args:
        key_heads, value_heads: how many heads queries and keys have, and how many values; `None`: as attention with
            keys and values of `num_key_value_heads` heads.
        key_width, value_width: of a head (`None`: the config's).
        conv: taps of the short convolution (0: none).
        negative: strengths of writing up to 2.
        num_householder: how often a token corrects the state (DeltaProduct).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "the gated delta rule: a linear attention that forgets and corrects, with short convolutions"

    conv: int = bounded(4, least=0)
    negative: bool = False
    num_householder: int = bounded(1, least=1)

    @property
    def writes(self) -> int:
        return self.num_householder

    def check_fields(self) -> None:
        super().check_fields()
        if self.writes > 1 and self.angles != "none":
            raise ValueError(
                f"{self.type} with `num_householder={self.writes}` has several keys to a token, which no position"
                f" turns, got `angles={self.angles!r}`; set it to 'none'."
            )

    def build(self, config, **where) -> GatedDeltaNetAttention:
        return GatedDeltaNetAttention(config, self, **where)
