# SPDX-License-Identifier: Apache-2.0
"""Average attention: a decoder's token reads the mean of all tokens up to it, through a feed-forward and a gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.call import Call, Sublayer, SublayerOutput, dropout_rate
from ..core.components import bounded, register
from ..core.initialization import start_linear
from ..core.visibility import visible_pairs
from ..ops.common.segments import accumulation_dtype
from .shared.base import Attention
from .shared.linear import state_layer
from .shared.spec import AttentionSpec


class AverageAttention(Attention):
    """g_j = FFN(1/j sum_{k <= j} y_k),   [i_j ; f_j] = sigmoid([y_j ; g_j] W + b),   o_j = i_j * y_j + f_j * g_j.

    Zhang, Xiong and Su 2018 (arXiv 1805.00631), eqs. 1-4; FFN(x) = W2 relu(W1 x + b1) + b2. The average is all there
    is of attention: no queries, keys and heads. `up_proj`, `down_proj` and `gate_proj` are the maps; without `use_ffn`
    g_j is the mean itself, without `use_gate` the output is g_j. The residual sum and its norm are the layer's.

    Sums are made in float32: a running sum of thousands of tokens has no digits left in half precision. j counts real
    tokens. Time O(T D F), memory O(T (D + F)). State: the sum [D] and the count of each text, whatever its length.
    """

    spec: AverageAttentionSpec

    inner_dropout = dropout_rate("activation_dropout")

    def __init__(self, config, spec: AverageAttentionSpec, *, layer_idx: int, cross: bool = False):
        Sublayer.__init__(self)  # no projections of heads, and no losses on them
        self.head_losses = nn.ModuleList()
        self.config, self.spec, self.layer_idx, self.cross = config, spec, layer_idx, cross
        self.num_heads, self.is_causal, self.position_terms = config.num_attention_heads, True, None
        width, inner = config.hidden_size, spec.inner_width(config)
        self.up_proj = nn.Linear(width, inner, bias=spec.bias) if spec.use_ffn else None
        self.down_proj = nn.Linear(inner, width, bias=spec.has_output_bias) if spec.use_ffn else None
        self.gate_proj = nn.Linear(2 * width, 2 * width, bias=spec.bias) if spec.use_gate else None
        self.inner_dropout = config.activation_dropout_prob

    def initialize(self, config, init) -> None:
        for linear in (self.up_proj, self.down_proj, self.gate_proj):
            if linear is not None:
                start_linear(config, init, linear)
        if self.down_proj is not None and config.initializer == "scaled_residual":
            std = config.initializer_range * max(2 * config.num_hidden_layers, 1) ** -0.5
            init.normal_(self.down_proj.weight, mean=0.0, std=std)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        layer, mask = (
            state_layer(past_key_values, self.layer_idx if step is None else step),
            context.query_padding_mask,
        )
        weights = self._matrix(hidden_states, context) if self.wants_weights(context) else None
        total = layer.state.get("total") if layer is not None else None
        count = layer.state.get("count") if layer is not None else None
        with torch.autocast(hidden_states.device.type, enabled=False):
            read = hidden_states.to(accumulation_dtype(hidden_states.dtype))
            real = read.new_ones(1, read.shape[1]) if mask is None else mask.to(read.dtype)
            read = read if mask is None else read * real[..., None]
            sums, counts = read.cumsum(1), real.cumsum(1).expand(read.shape[0], -1)
            if total is not None and count is not None:
                sums, counts = sums + total[:, None], counts + count
            if weights is not None and total is None:
                mean = torch.matmul(weights, read)
            else:
                mean = sums / counts.clamp(min=1)[..., None]
        if layer is not None:
            layer.advance(hidden_states.shape[1], total=sums[:, -1], count=counts[:, -1:])
        output = self._gated(hidden_states, self._mapped(mean.to(hidden_states.dtype)))
        if weights is not None:
            weights = weights.to(output.dtype)[:, None].expand(output.shape[0], self.num_heads, -1, -1)
        return SublayerOutput(output, weights)

    def _mapped(self, mean: Tensor) -> Tensor:
        if self.up_proj is None or self.down_proj is None:
            return mean
        inner = torch.relu(self.up_proj(mean))
        if self.training and self.inner_dropout:  # even at 0 dropout copies what it is given
            inner = F.dropout(inner, self.inner_dropout)
        return self.down_proj(inner)

    def _gated(self, states: Tensor, mapped: Tensor) -> Tensor:
        if self.gate_proj is None:
            return mapped
        of_input, of_mean = torch.sigmoid(self.gate_proj(torch.cat((states, mapped), dim=-1))).chunk(2, dim=-1)
        return of_input * states + of_mean * mapped

    def _matrix(self, states: Tensor, context: Call) -> Tensor:
        """1 / j for the tokens up to j, [B or 1, T, S]; zeros where there are none."""
        seen = visible_pairs(context)
        if seen is None:  # one token without anything before it, or after a text without padding
            matrix = states.new_ones(1, states.shape[1], context.key_index.shape[0])
        else:
            matrix = seen[:, 0]
        matrix = matrix.to(accumulation_dtype(states.dtype))
        return matrix / matrix.sum(-1, keepdim=True).clamp(min=1)


@register("attention", "average_attention", aliases=("average",))
class AverageAttentionSpec(AttentionSpec):
    """use_ffn: whether the mean goes through a feed-forward. ffn_size: its inner width (`None`: `intermediate_size`).
    use_gate: whether gates mix the token and what became of the mean."""

    not_taken_over = ("scale",)  # there are no scores
    summary = "the running mean of all tokens so far, through a feed-forward and a gate: a state of constant size"
    bidirectional = False
    acts = frozenset()

    use_ffn: bool = True
    ffn_size: int | None = bounded(None, least=1)
    use_gate: bool = True

    def inner_width(self, config) -> int:
        return config.intermediate_size if self.ffn_size is None else self.ffn_size

    def check_fields(self) -> None:
        if self.ffn_size is not None and not self.use_ffn:
            raise ValueError(
                f"average_attention has no feed-forward with `use_ffn=False`, but got `ffn_size={self.ffn_size}`;"
                " leave one of them out."
            )
        if self.scale is not None:
            raise ValueError(
                f"average_attention has no scores to scale, got `scale={self.scale}`; leave it unset (None)."
            )

    def projects_keys(self, config) -> bool:
        return False

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        return RecurrentStateLayer()

    def build(self, config, **where) -> AverageAttention:
        return AverageAttention(config, self, **where)
