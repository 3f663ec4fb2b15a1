# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention (Yang et al. 2024): a decay of each token for every channel of a key."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFGlaConfig(XFormerConfig):
    """Gated linear attention (Yang et al. 2024): a decay of each token for every channel of a key."""

    model_type = "xf_gla"

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    intermediate_size: int = 2816
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-6
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = preset({"type": "gla", "key_width": 128})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="linear attention with a decay of each token for every channel of a key",
    paper="Yang et al. 2024",
    url="https://arxiv.org/abs/2312.06635",
    equation=r"S_t = \mathrm{Diag}(a_t) S_{t-1} + k_t v_t^\top, \qquad a_t = \sigma(W_2 W_1 x_t + b)^{1/\tau}, \qquad "
    r"o_t = W_o \left[ \mathrm{RMSNorm}\!\left(S_t^\top q_t / \sqrt{K}\right) \odot \mathrm{SiLU}(W_g x_t) \right]",
    cost=(
        "time O(T (C (K + V) + K V)) per head for chunks of C tokens and heads of widths K and V, memory O(T D);"
        " generation keeps H K V numbers per layer at any length"
    ),
    cite="yang2024gated",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The preset is the published one"
        " of 340 million parameters. There are no attention probabilities, so `attention_probs_dropout_prob` has no"
        " effect."
    ),
)

make_family(XFGlaConfig, "XFGla", DECODER_HEADS, INFO)
