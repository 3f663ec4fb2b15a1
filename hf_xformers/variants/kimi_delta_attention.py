# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention (Kimi Team 2025): the gated delta rule with a decay for each channel of a key."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFKimiDeltaAttentionConfig(XFormerConfig):
    """Kimi Delta Attention (Kimi Team 2025): the gated delta rule with a decay for each channel of a key."""

    model_type = "xf_kimi_delta_attention"

    hidden_size: int = 2304
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    head_dim: int | None = 128
    intermediate_size: int = 9216
    max_position_embeddings: int = 32768
    layer_norm_eps: float = 1e-5
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = "kimi_delta_attention"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="the gated delta rule with a decay for each channel of a key",
    paper="Kimi Team 2025",
    url="https://arxiv.org/abs/2510.26692",
    equation=r"S_t = \left(I - \beta_t k_t k_t^\top\right) \mathrm{Diag}(a_t) S_{t-1} + \beta_t k_t v_t^\top, \qquad "
    r"o_t = W_o \left[ \mathrm{RMSNorm}\!\left(S_t^\top q_t / \sqrt{K}\right) \odot \sigma(W_g x_t) \right]",
    cost=(
        "time O(T (C (K + V) + K V)) per head for chunks of C tokens and heads of widths K and V, memory O(T D);"
        " generation keeps H K V numbers per layer, and three inputs of the convolution, at any length"
    ),
    cite="kimi2025linear",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The preset has the sizes of"
        " Kimi-Linear-48B-A3B without its experts and without its layers of softmax attention, one in four:"
        " `per_layer_config={3: {'attention': 'dense'}, ...}` mixes them. There are no attention probabilities, so"
        " `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFKimiDeltaAttentionConfig, "XFKimiDeltaAttention", DECODER_HEADS, INFO)
