# SPDX-License-Identifier: Apache-2.0
"""Lightning attention (MiniMax 2025): a constant decay for each head and layer."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFLightningAttentionConfig(XFormerConfig):
    """Lightning attention (MiniMax 2025): a constant decay for each head and layer."""

    model_type = "xf_lightning_attention"

    hidden_size: int = 6144
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    head_dim: int | None = 128
    intermediate_size: int = 9216
    max_position_embeddings: int = 32768
    layer_norm_eps: float = 1e-5
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = "lightning_attention"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="linear attention with a constant decay for each head and layer",
    paper="MiniMax 2025",
    url="https://arxiv.org/abs/2501.08313",
    equation=r"S_t = a_{h,l} S_{t-1} + k_t v_t^\top, \qquad [q\ k\ v] = \mathrm{SiLU}(W x), \qquad "
    r"o_t = W_o \left[ \sigma(W_g x_t) \odot \mathrm{RMSNorm}\!\left(S_t^\top q_t\right) \right]",
    cost=(
        "time O(T (C d + d^2)) per head for chunks of C tokens and heads of width d, memory O(T D); generation keeps"
        " H d^2 numbers per layer at any length"
    ),
    cite="minimax2025",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The preset has the sizes of"
        " MiniMax-Text-01 without its experts and without its layers of softmax attention, one in eight:"
        " `per_layer_config={7: {'attention': 'dense'}, ...}` mixes them. There are no attention probabilities, so"
        " `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFLightningAttentionConfig, "XFLightningAttention", DECODER_HEADS, INFO)
