# SPDX-License-Identifier: Apache-2.0
"""RWKV-7's time mixing: a delta rule with decays and learning rates for every channel of a key."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.prepared import Carry, State, States, one_state
from ..ops.common.products import widened
from ..ops.convolution.short import token_before
from .shared.recurrent import RecurrentAttention, RecurrentSpec, Tokens, unit_length

SLOWEST = -math.exp(-0.5)  # a state keeps at least e^-0.607 of a channel for each token
MIXES = "rwkvag"  # what token shifts are learned for


class FirstValues(State):
    """Values of the first layer [B, T, H dv], which the others mix in."""

    values: Tensor


class RWKV7Attention(RecurrentAttention):
    """S_t = Diag(a_t) S_{t-1} - (kk_t * i_t) (kk_t^T S_{t-1}) + k_t v_t^T,
    y_t = W_o [g_t * (Norm(S_t^T r_t) + (r_t^T (u * k_t)) v_t)].

    Peng et al. 2025 (arXiv 2503.14456), section 4: what every map reads is the token mixed with the one before it, x +
    (x_{t-1} - x) m. Of such, r, k and v are linear maps, a = exp(-e^(-1/2) sigmoid(.)), the in-context learning rate i
    = sigmoid(.) and the gate g are maps of low rank, kk is k * s of length 1, and then k <- k (1 + (i - 1) c). Values
    of all layers but the first are mixed with the first layer's, v + (v_first - v) sigmoid(.). m, s, c and u are
    learned for each channel, and Norm is a LayerNorm of each head. There is no scale.

    The state is read before it decays: kk_t / a_t is what the decayed one is read by, which bounded decays allow.
    """

    spec: RWKV7Spec

    def __init__(self, config, spec: RWKV7Spec, **where):
        super().__init__(config, spec, **where)
        width, inner, keys = config.hidden_size, self.inner_width, self.q_proj.out_features
        self.mix = nn.Parameter(torch.empty(len(MIXES), width))
        maps = {"decay": (spec.decay_rank, keys), "rate": (spec.rate_rank, keys), "gate": (spec.gate_rank, inner)}
        if self.layer_idx > 0:
            maps["value"] = spec.value_rank, inner
        for name, (rank, channels) in maps.items():
            self.add_module(f"{name}_down_proj", nn.Linear(width, rank, bias=False))
            self.add_module(f"{name}_up_proj", nn.Linear(rank, channels, bias=name != "gate"))
        self.key_scale, self.key_rate = nn.Parameter(torch.empty(keys)), nn.Parameter(torch.empty(keys))
        self.bonus = nn.Parameter(torch.empty(self.num_heads, self.key_width))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.empty(inner)), nn.Parameter(torch.empty(inner))

    undecayed = ("mix", "key_scale", "key_rate", "bonus", "norm_weight", "norm_bias")

    def initialize(self, config, init) -> None:
        """As the released code starts, but that no map starts at zero: upper layers mix less, and channels decay from
        slow to fast."""
        super().initialize(config, init)
        depth, last = config.num_hidden_layers, max(config.num_hidden_layers - 1, 1)
        channel = torch.arange(config.hidden_size) / config.hidden_size
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2]) * (1 - self.layer_idx / depth)
        init.copy_(self.mix, (1 - channel ** powers[:, None]).to(self.mix))
        decay, keys = self.get_submodule("decay_up_proj"), self.key_scale.shape[0]
        rise = torch.linspace(0, 1, keys) ** (0.85 + (self.layer_idx / last) ** 0.5)
        init.copy_(decay.bias, (5 * rise - 6.5).to(self.mix))
        for tensor, start in ((self.key_scale, 0.85), (self.key_rate, 1.0), (self.bonus, 0.0)):
            init.constant_(tensor, start)
        if self.layer_idx > 0:
            init.ones_(self.get_submodule("value_up_proj").bias)
        init.ones_(self.norm_weight)
        init.zeros_(self.norm_bias)

    def low_rank(self, name: str, x: Tensor, inner: Any = None) -> Tensor:
        """[B, T, D] through the map of low rank of this name, with a function between its parts."""
        down = self.get_submodule(f"{name}_down_proj")(x)
        return self.get_submodule(f"{name}_up_proj")(down if inner is None else inner(down))

    def forward(self, hidden_states: Tensor, context: Call, **given: Any) -> SublayerOutput:
        if self.layer_idx > 0 and context.state(FirstValues) is None:
            raise ValueError("rwkv7 layers mix in the values of layer 0, which has another attention here.")
        return super().forward(hidden_states, context, **given)

    def passed_on(self, key: Tensor, value: Tensor) -> States | None:
        return None if self.layer_idx else one_state(FirstValues(value.transpose(1, 2).flatten(2)))

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        before, window = token_before(hidden_states, window, context.query_padding_mask, context.segment_ids)
        mixed = torch.addcmul(hidden_states[..., None, :], (before - hidden_states)[..., None, :], self.mix)
        r, w, k, v, a, g = mixed.unbind(-2)
        query, key, value = self.q_proj(r), self.k_proj(k), self.v_proj(v)
        first = context.state(FirstValues)
        if first is not None:
            value = value + (first.values.to(value.dtype) - value) * torch.sigmoid(self.low_rank("value", v))
        (slow,) = widened(self.low_rank("decay", w, torch.tanh))
        log_decay, rate = SLOWEST * torch.sigmoid(slow), torch.sigmoid(self.low_rank("rate", a))
        direction = unit_length(self.by_head(key * self.key_scale), 1e-12, largest=True)
        key = key * (1 + (rate - 1) * self.key_rate)
        query, key, rate, log_decay, value = (self.by_head(x) for x in (query, key, rate, log_decay, value))
        wide, *products = widened(direction, query, key)  # products of long keys leave float16's range
        passed = (products[0] * products[1] * self.bonus[:, None]).sum(-1, keepdim=True) * value
        gate = self.low_rank("gate", g, torch.sigmoid)
        corrected = {"read": wide * torch.exp(-log_decay), "write": direction * rate}
        return Tokens(query, key, value, log_decay, passed=passed, gate=gate, **corrected), window

    def by_head(self, x: Tensor) -> Tensor:
        """[B, T, H w] -> [B, H, T, w]"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        assert tokens.passed is not None and tokens.gate is not None
        (wide,) = widened(output)
        normed = F.layer_norm(wide, wide.shape[-1:], eps=self.spec.eps(self.config)).flatten(2)
        normed = normed * self.norm_weight.to(wide.dtype) + self.norm_bias.to(wide.dtype)
        return (normed + tokens.passed.transpose(1, 2).flatten(2)) * tokens.gate


@register("attention", "rwkv7")
class RWKV7Spec(RecurrentSpec):
    """
    Args:
        key_width, value_width: of a head (the paper: 64; `None`: the config's).
        decay_rank, rate_rank, value_rank, gate_rank: inner widths of the maps to decays, to learning rates, to shares
            of the first layer's values and to gates.
        norm_eps: of the norm on the output (`None`: 1e-5 times the width of a head's values).
        chunk_size: tokens per quadratic block of a text.
    """

    summary = "RWKV-7: a delta rule with decays and learning rates of every channel, and token shift, causal"
    bidirectional = False
    scales = False
    turns = False

    decay_rank: int = bounded(64, least=1)
    rate_rank: int = bounded(64, least=1)
    value_rank: int = bounded(32, least=1)
    gate_rank: int = bounded(128, least=1)

    def carries(self, config) -> Carry:
        return Carry(FirstValues, (*self.heads(config), self.value_size(config)), of_first=True, handed_on=True)

    def eps(self, config) -> float:
        return 1e-5 * self.value_size(config) if self.norm_eps is None else self.norm_eps

    def check_fields(self) -> None:
        super().check_fields()
        if self.conv:
            raise ValueError(f"{self.type} mixes neighbors by its token shift, got `conv={self.conv}`; leave it at 0.")

    def check(self, config) -> None:
        super().check(config)
        if len(set(self.heads(config))) > 1:
            raise ValueError(
                f"{self.type} has a decay and a learning rate for every head of keys, got {self.heads(config)} heads"
                " of queries, keys and values; leave `num_key_value_heads`, `key_heads` and `value_heads` out."
            )

    def build(self, config, **where) -> RWKV7Attention:
        return RWKV7Attention(config, self, **where)
