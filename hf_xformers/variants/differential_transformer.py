# SPDX-License-Identifier: Apache-2.0
"""Differential Transformer (Ye et al. 2025): attention is the difference of two softmaxes."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDifferentialTransformerConfig(XFormerConfig):
    """Differential Transformer (Ye et al. 2025): attention is the difference of two softmaxes.

    `num_attention_heads` counts softmaxes, two to each head of the paper, and `head_dim` is the width of their queries
    and keys, half of that of a head's values.
    """

    model_type = "xf_differential_transformer"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    intermediate_size: int = 2048
    position: SpecLike = preset({"type": "rotary", "layout": "interleaved"})
    attention: SpecLike = "differential_attention"
    cross_attention: SpecLike = "differential_attention"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="the difference of two softmaxes: noise cancels",
    paper="Ye et al. 2025",
    url="https://arxiv.org/abs/2410.05258",
    equation=(
        r"O = (1 - \lambda_0)\, \mathrm{RMSNorm}\Big( \Big( \mathrm{softmax}\frac{Q_1 K_1^\top}{\sqrt d} - \lambda\,"
        r" \mathrm{softmax}\frac{Q_2 K_2^\top}{\sqrt d} \Big) V \Big), \qquad \lambda = e^{a_1 b_1} - e^{a_2 b_2} +"
        r" \lambda_0, \quad \lambda_0 = 0.8 - 0.6\, e^{-0.3\, l}"
    ),
    cost="time O(T^2 D), scores are made twice; memory O(T D); a cache as large as dense attention's",
    notes=(
        "Layers l count from 0. `--attention.pairing halves --attention.norm_weight false` is the layout of"
        " transformers' DiffLlama. `attention_probs_dropout_prob` has no effect."
    ),
    cite="ye2025differential",
)

make_family(XFDifferentialTransformerConfig, "XFDifferentialTransformer", ALL_HEADS, INFO)
