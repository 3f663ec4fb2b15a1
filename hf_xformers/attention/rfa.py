# SPDX-License-Identifier: Apache-2.0
"""Random feature attention, with and without a gate that forgets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.common.products import widened
from ..ops.linear.feature_maps import unit_vectors
from ..ops.linear.feature_pullbacks import FourierFeatures, ReluFeatures
from .shared.linear import Decay, LinearAttention, LinearSpec
from .shared.random_rows import RandomRows


class RFAAttention(RandomRows, LinearAttention):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j),    phi(x) = [cos(W x), sin(W x)] / sqrt(m).

    Peng et al. 2021 (arXiv 2103.02143), section 3.1. Queries and keys have length 1, so that the softmax kernel
    exp(q k / tau^2) is the Gaussian one up to a constant that cancels: phi(q) phi(k) estimates
    exp(-|q - k|^2 / (2 tau^2)). Each head has rows of its own; their normal numbers are drawn anew for every training
    pass ([`RandomRows`]) and multiplied by sigma / tau, where sigma [d] is learned (appendix C there). With
    `feature_map="arccos"` phi(x) = relu(W x) / sqrt(m) + 1e-3.

    `gate` (section 3.2, causal alone): with g_i = sigmoid(w x_i + b), one number per head,

        S_i = g_i S_{i-1} + (1 - g_i) phi(k_i)^T v_i,   z_i = g_i z_{i-1} + (1 - g_i) phi(k_i),   o_i = phi(q_i) S_i /
        phi(q_i) z_i,

    and the state that a cache keeps carries on from one segment of a text to the next ("stateful"). A padded token
    leaves it as it is.

    Sums of products of either sign can come near zero. Denominators, relative to the largest weight so far where there
    is a gate, are kept `min_denominator` away from it, with their sign (the released code has two ways to do so,
    which disagree). Rotary positions turn queries and keys before phi.
    """

    spec: RFASpec
    rotates_inputs = True  # the kernel is that of turned queries and keys
    undecayed = ("sigma",)

    def __init__(self, config, spec: RFASpec, **where):
        super().__init__(config, spec, **where)
        gaussian = spec.feature_map == "gaussian"
        self.phi = FourierFeatures(1 / spec.tau) if gaussian else ReluFeatures(1 / spec.tau, eps=1e-3)
        self.min_denominator = float(spec.min_denominator) if gaussian else 0.0
        self.make_rows(spec.num_features, by_head=True)
        self.sigma: nn.Parameter | None = None
        if spec.learn_sigma:
            self.sigma = nn.Parameter(torch.ones(self.num_heads, self.head_dim))
        self.decay_proj: nn.Linear | None = None
        if spec.gate:
            self.decay_proj = nn.Linear(config.hidden_size, self.num_heads)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.sigma is not None:
            init.ones_(self.sigma)

    def measured(self, vectors: Tensor) -> Tensor:
        return unit_vectors(vectors)

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        rows = self.rows(context)
        if self.sigma is not None:
            rows, sigma = widened(rows, self.sigma)
            rows = rows * sigma[:, None]
        return (rows,)

    def decay(self, states: Tensor, context: Call) -> Decay | None:
        if self.decay_proj is None:
            return None
        logits = self.decay_proj(states).transpose(1, 2)
        logits = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
        mask = context.query_padding_mask
        logs = F.logsigmoid(logits)
        if mask is not None:
            logs = logs.masked_fill(~mask[:, None], 0.0)
        passed = logs.cumsum(-1)
        return Decay(F.logsigmoid(-logits) - passed, passed[..., -1])


@register("attention", "rfa", aliases=("random_feature_attention",))
class RFASpec(LinearSpec):
    """
    Args:
        num_features: random rows m of each head (2 m features).
        feature_map: `gaussian` (softmax, whose scores are those of unit vectors over tau squared) or `arccos` (m
            features).
        tau: temperature.
        learn_sigma: the rows' scale for each channel of a head is learned.
        gate: earlier tokens are forgotten, with a gate for each head; causal only.
        orthogonal: rows orthogonal in blocks of the head width.
        redraw_interval: training passes between draws (0: never).
        seed: of the draws.
        min_denominator: least magnitude of a denominator of `gaussian` features.
        chunk_size: tokens per quadratic block of the causal scan.
    """

    splits = frozenset()  # rows and scales belong to single heads
    not_taken_over = ("scale",)  # queries and keys have length 1
    adds_up = True
    summary = "softmax attention of unit vectors by random Fourier features, gated if wanted: linear time"
    acts = frozenset({"rotation"})
    head_options = frozenset({"norm", "parts"})

    num_features: int = bounded(64, "features", least=1)
    feature_map: Literal["gaussian", "arccos"] = "gaussian"
    tau: float | int = bounded(1.0, above=0)
    learn_sigma: bool = True
    gate: bool = False
    orthogonal: bool = True
    redraw_interval: int = bounded(1, least=0)
    seed: int = bounded(0, least=0)
    min_denominator: float | int = bounded(1e-3, above=0)
    chunk_size: int = 64

    def check_fields(self) -> None:
        if self.scale is not None:
            raise ValueError(f"rfa scales by its `tau`, got `scale={self.scale}`; leave it unset (None).")

    def weighs(self, config) -> bool:
        return self.feature_map == "arccos"

    def sequence_form(self, config) -> SequenceForm | Unserved:
        if self.gate:
            return Unserved("with `gate` forgets earlier tokens by what stands after them in other parts")
        return super().sequence_form(config)

    def check(self, config) -> None:
        if not self.gate:
            return
        if config.cross_attention is self or not config.is_decoder:
            raise ValueError(
                "rfa with `gate` forgets earlier tokens, which needs an order of them: it is for causal"
                " self-attention; set `gate=False` in an encoder and in `cross_attention`."
            )

    def build(self, config, **where) -> RFAAttention:
        return RFAAttention(config, self, **where)
