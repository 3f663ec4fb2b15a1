# SPDX-License-Identifier: Apache-2.0
"""Evolved Transformer (So et al. 2019): cells found by an evolutionary search, with gates and convolutions."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFEvolvedTransformerConfig(XFormerConfig):
    """Evolved Transformer (So et al. 2019): cells found by an evolutionary search, with gates and convolutions.

    A layer does about the work of two of the vanilla Transformer: the paper has three in the encoder and, with
    `num_decoder_layers=4` as in the released code, four in the decoder.
    """

    model_type = "xf_evolved_transformer"

    hidden_size: int = 512
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "evolved_transformer"
    block: SpecLike = "evolved_transformer"


INFO = VariantInfo(
    section="6.5",
    summary="searched cells: gates, convolutional branches, two attentions",
    paper="So et al. 2019",
    url="https://arxiv.org/abs/1901.11117",
    equation=(
        r"x \mathrel{+}= \mathrm{GLU}(x);\; x \mathrel{+}= \mathrm{SepConv}_9(\mathrm{LN}(\mathrm{relu}(xW) +"
        r" \mathrm{relu}(\mathrm{Conv}_3(x))));\; x \mathrel{+}= \mathrm{MHA}(x);\; x \mathrel{+}= \mathrm{FF}(x)"
    ),
    cost="time O(T^2 D) and 21.5 D^2 parameters in an encoder layer, which stands for two",
    notes=(
        "The equation is the encoder's cell. A decoder's has attention with 16 heads next to cross-attention,"
        " separable convolutions of 11 and 7 tokens and then of 7, attention, cross-attention, and a feed-forward"
        " with a Swish and a norm. Convolutions of a decoder end at their token, and generation"
        " keeps their last inputs alone."
    ),
    cite="so2019evolved",
)

make_family(XFEvolvedTransformerConfig, "XFEvolvedTransformer", ALL_HEADS, INFO)
