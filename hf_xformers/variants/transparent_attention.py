# SPDX-License-Identifier: Apache-2.0
"""Transparent attention (Bapna et al. 2018): decoder layers read learned mixtures of all encoder layers."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFTransparentAttentionConfig(XFormerConfig):
    """Transparent attention (Bapna et al. 2018): decoder layers read learned mixtures of all encoder layers."""

    model_type = "xf_transparent_attention"

    hidden_size: int = 512
    num_hidden_layers: int = 16  # the depth at which the ordinary encoder no longer trained
    num_decoder_layers: int | None = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    eos_token_id: int | list[int] | None = 1
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"
    stack: SpecLike = "transparent"


INFO = VariantInfo(
    section="6.2",
    summary="each decoder layer reads its own softmax mixture of all encoder layers' outputs",
    paper="Bapna et al. 2018",
    url="https://arxiv.org/abs/1808.07561",
    equation=r"Z_j = \sum_{i=0}^{N} s_{ij} H_i, \qquad s_{\cdot j} = \mathrm{softmax}(W_{\cdot j})",
    cost=(
        "that of the vanilla Transformer plus O(N M T D) for N encoder and M decoder layers; (N + 1) M more parameters"
    ),
    notes=(
        "H_0 is the encoder's input. Decoder layer j takes the keys and values of its cross-attention from Z_j. The"
        " encoder's output object carries the mixtures as `memories`, which has to be given where `encoder_outputs`"
        " are reused."
    ),
    cite="bapna2018training",
)

make_family(XFTransparentAttentionConfig, "XFTransparentAttention", SEQ2SEQ_HEADS, INFO)
