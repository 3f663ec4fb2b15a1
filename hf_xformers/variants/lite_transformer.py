# SPDX-License-Identifier: Apache-2.0
"""Lite Transformer (Wu et al. 2020): attention on half of the channels, dynamic convolution on the others."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLiteTransformerConfig(XFormerConfig):
    """Lite Transformer (Wu et al. 2020): attention on half of the channels, dynamic convolution on the others.

    The size is that of the paper's largest translation model (527 million multiplications and additions for 30
    tokens).
    """

    model_type = "xf_lite_transformer"

    hidden_size: int = 496
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: int = 496
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    feedforward: SpecLike = "relu"
    block: SpecLike = "lite_transformer"


INFO = VariantInfo(
    section="6.1",
    summary="attention on half of the channels, dynamic convolution on the others, flat FFN",
    paper="Wu et al. 2020",
    url="https://arxiv.org/abs/2004.11886",
    equation=(
        r"y = [\mathrm{MHA}(x_a) \mid \mathrm{DynConv}_k(\mathrm{GLU}(x_c W_1)) W_2], \qquad x = [x_a \mid x_c]"
    ),
    cost="time O(T^2 D / 2 + T k D / 2) and 3.75 D^2 parameters in an encoder layer (vanilla: T^2 D and 12 D^2)",
    notes=(
        "Kernels reach 3, 7, 15 and then 31 tokens. Taps beyond the text keep their share of the softmax, as in the"
        " released code. `intermediate_size` equals `hidden_size`: the flattened feed-forward."
    ),
    cite="wu2020lite",
)

make_family(XFLiteTransformerConfig, "XFLiteTransformer", ALL_HEADS, INFO)
