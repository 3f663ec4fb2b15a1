# SPDX-License-Identifier: Apache-2.0
"""Differential attention: what one softmax weighs less what another one does."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..normalization.layer_norm import RMSNorm
from ..ops.common.products import widened
from .dense import DenseAttention, DenseSpec


class DifferentialAttention(DenseAttention):
    """o_p = (1 - l0) RMSNorm((softmax(Q_1 K_1^T / sqrt(d)) - l softmax(Q_2 K_2^T / sqrt(d))) V), of width 2d as V,
    l = exp(a_1 b_1) - exp(a_2 b_2) + l0, l0 = 0.8 - 0.6 exp(-0.3 layer), layers counted from 0.

    Ye et al. 2025 (arXiv 2410.05258), eqs. 1-3. Two heads of the config are the two softmaxes of a pair: H heads of
    width d are H / 2 pairs, which read values of width 2d. The learned vectors a and b [d] are those of the layer. A
    half of the values is read at a time, so that values are no wider than keys, as fused kernels have it; time is that
    of dense attention with the scores made twice. State: keys and values of all tokens, as many as dense attention.

    The weights given out [B, H, T, S] are those of each softmax. `attention_probs_dropout_prob` has no effect: the
    authors define no dropout of a difference.
    """

    spec: DifferentialSpec

    def __init__(self, config, spec: DifferentialSpec, **where):
        super().__init__(config, spec, **where)
        self.dropout = 0.0
        self.lambda_start = 0.8 - 0.6 * math.exp(-0.3 * self.layer_idx)
        self.lambda_q1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_q2 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k2 = nn.Parameter(torch.empty(self.head_dim))
        width, eps = 2 * self.head_dim, config.layer_norm_eps
        self.pair_norm: nn.Module = (
            RMSNorm(width, eps) if spec.norm_weight else nn.RMSNorm(width, eps, elementwise_affine=False)
        )

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            init.normal_(vector, mean=0.0, std=self.spec.lambda_std)

    def subtracted(self) -> Tensor:
        """l, the factor on the second softmax of every pair, a number in float32 at least."""
        q1, k1, q2, k2 = widened(self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_start

    def halves(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Values [B, K, S, d] -> the first and the second half of what each key head's pair reads, [B, K, S, d]."""
        if self.spec.pairing == "halves":
            first, second = value.chunk(2, dim=1)
            return first.repeat(1, 2, 1, 1), second.repeat(1, 2, 1, 1)
        return value[:, 0::2].repeat_interleave(2, dim=1), value[:, 1::2].repeat_interleave(2, dim=1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """query [B, H, T, d], key and value [B, K, S, d] -> output [B, T, H / 2, 2d], the weights of each softmax."""
        found = [super(DifferentialAttention, self).attend(query, key, half, context) for half in self.halves(value)]
        read = torch.cat([output for output, _ in found], dim=-1)
        first, second = read.chunk(2, dim=2) if self.spec.pairing == "halves" else (read[:, :, 0::2], read[:, :, 1::2])
        # The difference of similar numbers, which the norm brings back to their size.
        first, second = widened(first, second)
        output = self.pair_norm(first - self.subtracted() * second) * (1 - self.lambda_start)
        return output.to(query.dtype), found[0][1]


@register("attention", "differential_attention", aliases=("diff_transformer",))
class DifferentialSpec(DenseSpec):
    """pairing: which two heads are a pair, `neighbors` 2p and 2p + 1 (the authors' code) or `halves` p and p + H / 2
    (DiffLlama); values pair likewise. norm_weight: whether the norm of each pair has a weight (the authors' code) or
    not (DiffLlama). lambda_std: standard deviation of the vectors that make lambda, at the start."""

    summary = "the difference of two softmaxes, whose noise cancels"
    splits = frozenset()
    acts = frozenset({"head_terms", "rotation", "score_bias", "score_terms"})
    head_options = frozenset({"norm"})
    supports = frozenset({"packed_rows", "pages", "pair_mask", "token_numbers"})

    bias: bool = False
    pairing: Literal["neighbors", "halves"] = "neighbors"
    norm_weight: bool = True
    lambda_std: float | int = bounded(0.1, least=0)

    def check(self, config) -> None:
        if config.key_value_heads % 2:  # then `num_attention_heads`, a multiple of it, is even as well
            raise ValueError(
                "differential_attention pairs heads, of queries and of keys and values, and needs an even number of"
                f" both, got `num_key_value_heads` {config.key_value_heads}; choose an even one."
            )

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return Unserved("reads every key of a text")

    def build(self, config, **where) -> DifferentialAttention:
        return DifferentialAttention(config, self, **where)
