# SPDX-License-Identifier: Apache-2.0
"""Gated delta networks (Yang, Kautz, Hatamizadeh 2024): the delta rule with a state that decays."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFGatedDeltaNetConfig(XFormerConfig):
    """Gated delta networks (Yang, Kautz, Hatamizadeh 2024): the delta rule with a state that decays."""

    model_type = "xf_gated_delta_net"

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
    attention: SpecLike = preset({"type": "gated_delta_net", "key_width": 128, "value_width": 128})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="the delta rule with a state that decays by a gate of each token, and short convolutions before it",
    paper="Yang et al. 2024",
    url="https://arxiv.org/abs/2412.06464",
    equation=r"S_t = a_t \left(I - \beta_t k_t k_t^\top\right) S_{t-1} + \beta_t k_t v_t^\top, \qquad "
    r"o_t = W_o \left[ \mathrm{RMSNorm}\!\left(S_t^\top q_t / \sqrt{K}\right) \odot \mathrm{SiLU}(W_z x_t) \right]",
    cost=(
        "time O(T (C (K + V) + K V)) per head for chunks of C tokens and heads of widths K and V, memory O(T D);"
        " generation keeps H K V numbers per layer, and three inputs of the convolution, at any length"
    ),
    cite="yang2025gated",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The preset has the sizes of"
        " Qwen3.5's smallest model. There, and in Qwen3-Next, every fourth layer is softmax attention:"
        " `per_layer_config={3: {'attention': 'dense'}, ...}` with `position='rotary'`, which turns those layers"
        " alone. `key_heads` and `value_heads` make fewer heads of queries and keys than of values. There are no"
        " attention probabilities, so `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFGatedDeltaNetConfig, "XFGatedDeltaNet", DECODER_HEADS, INFO)
