# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention: a decay of each token for every channel of a key."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.products import widened
from .shared.recurrent import GatedNorm, RecurrentAttention, RecurrentSpec, Tokens


class GatedLinearAttention(RecurrentAttention):
    """S_t = Diag(a_t) S_{t-1} + k_t v_t^T,   y_t = W_o [RMSNorm(S_t^T q_t / sqrt(K)) SiLU(W_g x_t)],   a_t =
    sigmoid(W_2 W_1 x_t + b)^{1 / tau}.

    Yang, Wang, Shen, Panda and Kim 2024 (arXiv 2312.06635), sections 4.1 and 4.4: queries, keys and values are
    projections as they are, and gates, of low rank, stay near 1 because of tau.
    """

    spec: GLASpec

    def __init__(self, config, spec: GLASpec, **where):
        super().__init__(config, spec, **where)
        width = config.hidden_size
        self.decay_down_proj = nn.Linear(width, spec.gate_rank, bias=False)
        self.decay_up_proj = nn.Linear(spec.gate_rank, self.num_heads * self.key_width, bias=True)
        self.gate_proj = nn.Linear(width, self.inner_width, bias=False)
        self.output_norm = GatedNorm(self.inner_width, spec.eps(config), groups=self.num_heads, shared=True)

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        query, key, value, window = self.query_key_value(hidden_states, context, window)
        query, key = self.turned(query * self.scaling, key, context)
        (gates,) = widened(self.decay_up_proj(self.decay_down_proj(hidden_states)))
        log_decay = F.logsigmoid(gates).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) / self.spec.tau
        return Tokens(query, key, value, log_decay), window

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        assert self.gate_proj is not None
        return self.output_norm(output.flatten(2), self.gate_proj(hidden_states))


@register("attention", "gla", aliases=("gated_linear_attention",))
class GLASpec(RecurrentSpec):
    """
    Args:
        key_heads, value_heads: how many heads queries and keys have, and how many values; `None`: as attention with
            keys and values of `num_key_value_heads` heads.
        key_width, value_width: of a head (the paper: D / (2 H) and D / H; `None`: the config's).
        gate_rank: inner width of the gates.
        tau: their root.
        conv: taps of a short convolution (0: none).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "linear attention with a decay of each token for every channel of a key"

    gate_rank: int = bounded(16, least=1)
    tau: float | int = bounded(16.0, above=0)

    def build(self, config, **where) -> GatedLinearAttention:
        return GatedLinearAttention(config, self, **where)
