# SPDX-License-Identifier: Apache-2.0
"""Forgetting Transformer (Lin et al. 2025): softmax attention with forget gates in place of positions."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFForgettingTransformerConfig(XFormerConfig):
    """Forgetting Transformer (Lin et al. 2025): softmax attention with forget gates in place of positions."""

    model_type = "xf_forgetting_transformer"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    intermediate_size: int = 2048
    is_decoder: bool = True
    position: SpecLike = "forget_gate"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="scores fall with what gates in between forget",
    paper="Lin et al. 2025",
    url="https://arxiv.org/abs/2503.02130",
    equation=(
        r"o_i = \sum_{j \le i} \mathrm{softmax}_j \Big( \frac{q_i k_j^\top}{\sqrt d} + \sum_{t=j+1}^{i} \log f_t \Big)"
        r" v_j, \qquad f_t = \sigma(w x_t + b)"
    ),
    cost="time O(T^2 D), memory O(T): the sums are made in tiles; a cache of one more number per head and token",
    notes=(
        "Causal only. The gates are a position, `forget_gate`, which any pattern of positions can have as well:"
        " `--attention band_attention --attention.window 512`. The authors' Pro block (norms of queries and keys, an"
        " output gate, shifted keys and values) is not the preset; `--attention.query_key_norm head"
        " --attention.output_gate element` are parts of it."
    ),
    cite="lin2025forgetting",
)

make_family(XFForgettingTransformerConfig, "XFForgettingTransformer", DECODER_HEADS, INFO)
