# SPDX-License-Identifier: Apache-2.0
"""Lightning attention: linear attention with a constant decay for each head and layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..core.precision import Float32Module
from .shared.recurrent import GatedNorm, RecurrentAttention, RecurrentSpec, Tokens


class LayerDecay(Float32Module):
    """log a_{h, l} = -2^{-8 (h + 1) / H} (1 - l / (L - 1) + 1e-5): heads and lower layers forget faster. Kept with the
    weights, since a layer that is moved, or whose neighbors are cut out, continues with what it has learned with."""

    def __init__(self, heads: int, layer_idx: int, layers: int):
        super().__init__()
        self.heads, self.layer_idx, self.layers = heads, layer_idx, layers
        self.register_buffer("log_decay", self._start().to(torch.empty(0)))
        self.log_decay: Tensor

    def _start(self) -> Tensor:
        with torch.device("cpu"):
            slopes = torch.exp2(-8.0 * torch.arange(1, self.heads + 1, dtype=torch.float64) / self.heads)
        return -slopes * (1 - self.layer_idx / (self.layers - 1 + 1e-5) + 1e-5)

    def initialize(self, config, init) -> None:
        init.copy_(self.log_decay, self._start().to(self.log_decay))

    def forward(self, x: Tensor) -> Tensor:
        """Of every token of x [B, T, D]: [B, H, T]"""
        return self.log_decay[None, :, None].expand(x.shape[0], -1, x.shape[1])


class LightningAttention(RecurrentAttention):
    """S_t = a_{h, l} S_{t-1} + k_t v_t^T,   y_t = W_o [sigmoid(W_g x_t) RMSNorm(S_t^T q_t)],   [q k v] = SiLU(W x).

    MiniMax 2025 (arXiv 2501.08313), section 2.2.1; the decays, constants of a head and a layer, are those of
    TransNormer (Qin et al. 2023, arXiv 2307.14995, section 3.1). There is no scale; the norm is one of all heads.
    """

    spec: LightningSpec

    def __init__(self, config, spec: LightningSpec, **where):
        super().__init__(config, spec, **where)
        self.gate_proj = nn.Linear(config.hidden_size, self.inner_width, bias=False)
        self.output_norm = GatedNorm(self.inner_width, spec.eps(config), gate="sigmoid")
        self.decay = LayerDecay(self.num_heads, self.layer_idx, config.num_hidden_layers)

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        query, key, value, window = self.query_key_value(hidden_states, context, window)
        if self.short_conv is None:
            query, key, value = F.silu(query), F.silu(key), F.silu(value)
        query, key = self.turned(query, key, context)
        return Tokens(query, key, value, self.decay(hidden_states)), window

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        assert self.gate_proj is not None
        return self.output_norm(output.flatten(2), self.gate_proj(hidden_states))


@register("attention", "lightning_attention")
class LightningSpec(RecurrentSpec):
    """
    Args:
        key_heads, value_heads: how many heads queries and keys have, and how many values; `None`: as attention with
            keys and values of `num_key_value_heads` heads.
        key_width, value_width: of a head (`None`: the config's).
        conv: taps of a short convolution (0: none).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "linear attention with a constant decay for each head and layer"
    scales = False

    norm_eps: float | None = bounded(1e-6, above=0)

    def build(self, config, **where) -> LightningAttention:
        return LightningAttention(config, self, **where)
