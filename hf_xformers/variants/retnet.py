# SPDX-License-Identifier: Apache-2.0
"""Retentive network (Sun et al. 2023): rotations and a constant decay for each head."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFRetNetConfig(XFormerConfig):
    """Retentive network (Sun et al. 2023): rotations and a constant decay for each head."""

    model_type = "xf_retnet"

    vocab_size: int = 50257
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-6
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = "retnet"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "gelu"


INFO = VariantInfo(
    section="successors",
    summary="linear attention with rotations and a constant decay for each head",
    paper="Sun et al. 2023",
    url="https://arxiv.org/abs/2307.08621",
    equation=r"S_t = \gamma_h S_{t-1} + k_t v_t^\top, \qquad \gamma_h = 1 - 2^{-5-h}, \qquad "
    r"o_t = W_o \left[ \mathrm{RMSNorm}\!\left(S_t^\top q_t\right) \odot \mathrm{SiLU}(W_g x_t) \right]",
    cost=(
        "time O(T (C (K + V) + K V)) per head for chunks of C tokens and heads of widths K and V = 2 K, memory O(T D);"
        " generation keeps H K V numbers per layer at any length"
    ),
    cite="sun2023retentive",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The preset has the sizes of the"
        " 1.3B model. Positions are in the retention itself, which turns queries and keys. There are no attention"
        " probabilities, so `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFRetNetConfig, "XFRetNet", DECODER_HEADS, INFO)
