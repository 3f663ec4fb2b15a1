# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaProduct (Siems et al. 2025): several steps of the gated delta rule for each token."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFDeltaProductConfig(XFormerConfig):
    """Gated DeltaProduct (Siems et al. 2025): several steps of the gated delta rule for each token."""

    model_type = "xf_delta_product"

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 3584
    max_position_embeddings: int = 32768
    layer_norm_eps: float = 1e-6
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = preset(
        {
            **{"type": "gated_delta_net", "key_width": 128, "value_width": 128},
            **{"num_householder": 2, "negative": True},
        }
    )
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="several steps of the gated delta rule for each token",
    paper="Siems et al. 2025",
    url="https://arxiv.org/abs/2502.10297",
    equation=r"S_t = a_t \left( \prod_{j=n}^{1} \left(I - \beta_{tj} k_{tj} k_{tj}^\top\right) \right) S_{t-1}"
    r" + \sum_j \left( \prod_{i=n}^{j+1} \left(I - \beta_{ti} k_{ti} k_{ti}^\top\right) \right) \beta_{tj} k_{tj}"
    r" v_{tj}^\top",
    cost=(
        "that of a gated delta network for a text n times as long, whose state it has: time O(n T (C (K + V) + K V))"
        " per head, memory O(n T D)"
    ),
    cite="siems2025deltaproduct",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The state decays once for each"
        " token and is then corrected n = `num_householder` times, by keys, values and strengths of their own, before"
        " it is read as a gated delta network's is; n = 1 is that network. Strengths reach 2, so that eigenvalues of a"
        " step may be negative. The sizes are those of `xf_gated_delta_net`. Attention weights are those of all values"
        " of a token together."
    ),
)

make_family(XFDeltaProductConfig, "XFDeltaProduct", DECODER_HEADS, INFO)
