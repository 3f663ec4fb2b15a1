# SPDX-License-Identifier: Apache-2.0
"""HGRN2 (Qin et al. 2024): linear attention whose keys are what forget gates let go."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFHgrn2Config(XFormerConfig):
    """HGRN2 (Qin et al. 2024): linear attention whose keys are what forget gates let go."""

    model_type = "xf_hgrn2"

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 5632
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-6
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = "hgrn2"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="linear attention whose keys are what forget gates let go",
    paper="Qin et al. 2024",
    url="https://arxiv.org/abs/2404.07904",
    equation=r"S_t = \mathrm{Diag}(f_t) S_{t-1} + (1 - f_t) v_t^\top, \qquad f_t = b_l + (1 - b_l) \odot"
    r" \sigma(W_f x_t), \qquad o_t = W_o \, \mathrm{RMSNorm}\!\left(S_t^\top \mathrm{SiLU}(W_q x_t)\right)",
    cost=(
        "time O(T (C (K + V) + K V)) per head for chunks of C tokens and heads of widths K and V, memory O(T D);"
        " generation keeps H K V numbers per layer at any length"
    ),
    cite="qin2024hgrn2",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The lower bounds of gates are"
        " learned, 0 in the first layer and higher in each that follows; the first layer owns them, so that it has to"
        " be of this type where layers differ. The preset has 1.3 billion parameters. There are no attention"
        " probabilities, so `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFHgrn2Config, "XFHgrn2", DECODER_HEADS, INFO)
