# SPDX-License-Identifier: Apache-2.0
"""HGRN2: linear attention whose keys are what forget gates let go, with lower bounds of gates that rise with depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call, SublayerOutput
from ..core.components import register
from ..core.prepared import Carry, State, one_state
from ..ops.common.products import widened
from .shared.recurrent import GatedNorm, RecurrentAttention, RecurrentSpec, Tokens


class LowerBounds(State):
    """Of the gates of all layers, [1, L, H K]."""

    bounds: Tensor


class HGRN2Attention(RecurrentAttention):
    """S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_t^T,   y_t = W_o RMSNorm(S_t^T SiLU(W_q x_t)),   f_t = b_l + (1 - b_l)
    sigmoid(W_f x_t).

    Qin et al. 2024 (arXiv 2404.07904), section 3: the key of a token is what its forget gate lets go, and there is no
    scale. The lower bound of gates in layer l is b_l = sum_{j=1}^{l} softmax_j(B), 0 in layer 0, where B [L, H K] is
    learned: upper layers forget less (Qin et al. 2023, arXiv 2311.04823, section 3.2). Layer 0 owns B and passes the
    bounds of all layers on. The norm is one of all heads.
    """

    spec: HGRN2Spec

    def __init__(self, config, spec: HGRN2Spec, **where):
        super().__init__(config, spec, **where)
        self.output_norm = GatedNorm(self.inner_width, spec.eps(config))
        self.lower_bounds: nn.Parameter | None = None
        if self.layer_idx == 0:
            self.lower_bounds = nn.Parameter(torch.empty(config.num_hidden_layers, self.k_proj.out_features))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.lower_bounds is not None:
            init.zeros_(self.lower_bounds)  # bounds that rise evenly

    def forward(self, hidden_states: Tensor, context: Call, **given: Any) -> SublayerOutput:
        if self.lower_bounds is None:
            return super().forward(hidden_states, context, **given)
        shares = torch.softmax(widened(self.lower_bounds)[0], dim=0)
        bounds = (shares.cumsum(0) - shares[:1])[None]
        passed = one_state(LowerBounds(bounds))
        context = context.passing({**context.states, **passed})
        return super().forward(hidden_states, context, **given)._replace(states=passed)

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        query, gate, value, window = self.query_key_value(hidden_states, context, window)
        (wide,) = widened(gate)
        found = context.state(LowerBounds)
        if found is None:
            raise ValueError("hgrn2 layers read the lower bounds of layer 0, which has another attention here.")
        least = found.bounds[0, self.layer_idx].to(wide.dtype).unflatten(0, (-1, 1, self.key_width))
        least = least.repeat_interleave(wide.shape[1] // least.shape[0], dim=0)
        log_decay, key = F.logsigmoid(wide), (1 - least) * torch.sigmoid(-wide)
        if self.layer_idx > 0:
            log_decay = torch.logaddexp(least.log(), torch.log1p(-least) + log_decay)
        query, key = self.turned(F.silu(query), key.to(query.dtype), context)
        log_decay = log_decay.repeat_interleave(self.num_heads // log_decay.shape[1], dim=1)
        return Tokens(query, key, value, log_decay), window

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        return self.output_norm(output.flatten(2))


@register("attention", "hgrn2")
class HGRN2Spec(RecurrentSpec):
    """
    Args:
        key_heads, value_heads: how many heads queries and gates have, and how many values; `None`: as attention with
            keys and values of `num_key_value_heads` heads.
        key_width, value_width: of a head (the paper: 128; `None`: the config's).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "linear attention whose keys are what forget gates let go"
    scales = False

    def carries(self, config) -> Carry:
        sizes = config.num_hidden_layers, self.heads(config)[1], self.key_size(config)
        return Carry(LowerBounds, sizes, of_first=True, handed_on=True)

    def check_fields(self) -> None:
        super().check_fields()
        if self.conv:
            raise ValueError(
                f"{self.type} makes gates of what its projections give, got `conv={self.conv}`; leave it at 0."
            )

    def build(self, config, **where) -> HGRN2Attention:
        return HGRN2Attention(config, self, **where)
