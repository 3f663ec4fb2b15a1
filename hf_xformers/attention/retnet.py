# SPDX-License-Identifier: Apache-2.0
"""Retention: linear attention with rotations and a constant decay for each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.segments import accumulation_dtype
from .shared.recurrent import GatedNorm, RecurrentAttention, RecurrentSpec, Tokens


class Retention(RecurrentAttention):
    """S_t = a_h S_{t-1} + k_t v_t^T,   y_t = W_o [RMSNorm(S_t^T q_t) SiLU(W_g x_t)],   a_h = 1 - 2^{-5 - h}.

    Sun et al. 2023 (arXiv 2307.08621), section 2.1, equations 5-8: queries and keys are turned by positions, pairs of
    neighboring channels by rates that fall from 1 to 1 / `theta`, keys are divided by sqrt(K), and values are twice
    as wide. The norm of each head has no weights. The released code divides by further sums, which the norm takes out
    again but for its epsilon.
    """

    spec: RetNetSpec

    def __init__(self, config, spec: RetNetSpec, **where):
        super().__init__(config, spec, **where)
        self.gate_proj = nn.Linear(config.hidden_size, self.inner_width, bias=False)
        self.output_norm = GatedNorm(self.inner_width, spec.eps(config), groups=self.num_heads, gain=False)

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        query, key, value, window = self.query_key_value(hidden_states, context, window)
        wide, device = accumulation_dtype(value.dtype), value.device
        rates = self.spec.theta ** -torch.linspace(0.0, 1.0, self.key_width // 2, dtype=wide, device=device)
        angles = context.positions[:, None, :, None].to(wide) * rates
        cos, sin = angles.cos(), angles.sin()
        heads = torch.arange(self.num_heads, dtype=wide, device=device)
        log_decay = torch.log1p(-torch.exp2(-5.0 - heads))
        log_decay = log_decay[None, :, None].expand(value.shape[0], -1, value.shape[2])
        return Tokens(_turned(query, cos, sin), _turned(key * self.scaling, cos, sin), value, log_decay), window

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        assert self.gate_proj is not None
        return self.output_norm(output.flatten(2), self.gate_proj(hidden_states))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighboring channels turned by angles [B or 1, 1, T, K / 2]."""
    even, odd = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


@register("attention", "retnet", aliases=("retention",))
class RetNetSpec(RecurrentSpec):
    """
    Args:
        key_heads, value_heads: how many heads queries and keys have, and how many values; `None`: as attention with
            keys and values of `num_key_value_heads` heads.
        key_width: of a head (`None`: the config's).
        value_width: of a head (`None`: twice that of keys).
        theta: the smallest rate of a rotation is 1 / theta.
        conv: taps of a short convolution (0: none).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "retention: linear attention with rotations and a constant decay for each head"
    turns = False

    theta: float | int = bounded(10000.0, above=1)

    def value_size(self, config) -> int:
        return self.value_width or 2 * self.key_size(config)

    def check(self, config) -> None:
        super().check(config)
        if self.key_size(config) % 2:
            raise ValueError(
                f"retnet turns pairs of channels, but heads of queries have {self.key_size(config)}; make `key_width`"
                " even."
            )

    def build(self, config, **where) -> Retention:
        return Retention(config, self, **where)
