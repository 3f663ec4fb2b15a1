# SPDX-License-Identifier: Apache-2.0
"""The vanilla Transformer (Vaswani et al. 2017): the encoder-decoder that every X-former modifies."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFTransformerConfig(XFormerConfig):
    """The vanilla Transformer (Vaswani et al. 2017): the encoder-decoder that every X-former modifies."""

    model_type = "xf_transformer"

    vocab_size: int = 37000
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    eos_token_id: int | list[int] | None = 1
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="2",
    summary="dense softmax attention, sinusoids, post-LN",
    paper="Vaswani et al. 2017",
    url="https://arxiv.org/abs/1706.03762",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    cite="vaswani2017attention",
)

make_family(XFTransformerConfig, "XFTransformer", SEQ2SEQ_HEADS, INFO)
