# SPDX-License-Identifier: Apache-2.0
"""Average Attention Network (Zhang et al. 2018): a decoder whose tokens read the mean of all tokens up to them."""

from __future__ import annotations

from typing import Literal

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFAverageAttentionConfig(XFormerConfig):
    """Average Attention Network (Zhang et al. 2018): a decoder whose tokens read the mean of all tokens up to them.

    The encoder of an encoder-decoder has dense attention in its place, as long as `attention` has a causal form
    alone.
    """

    model_type = "xf_average_attention"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "xavier"
    is_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    feedforward: SpecLike = "relu"
    attention: SpecLike = "average_attention"

    def tower(self, name: Literal["trunk", "decoder"]) -> XFormerConfig:
        view = super().tower(name)
        if name == "trunk" and self.is_encoder_decoder and not view.is_heterogeneous:
            if not view.attention.bidirectional:
                view.attention = "dense"
        return view


INFO = VariantInfo(
    section="4.5",
    summary="a decoder's self-attention is the mean of all tokens so far, through a feed-forward and a gate",
    paper="Zhang et al. 2018",
    url="https://arxiv.org/abs/1805.00631",
    equation=(
        r"g_j = \mathrm{FFN}\Big(\frac{1}{j} \sum_{k \le j} y_k\Big), \qquad [i_j; f_j] = \sigma(W [y_j; g_j]), \qquad"
        r" o_j = i_j \odot y_j + f_j \odot g_j"
    ),
    cost="time O(T D F) with inner width F, memory O(T F); generation keeps D + 1 numbers per layer at any length",
    cite="zhang2018accelerating",
    notes=(
        "It is causal by nature: the encoder of an encoder-decoder has dense attention, and so has cross-attention."
        " `num_attention_heads` counts for those alone."
    ),
)

make_family(XFAverageAttentionConfig, "XFAverageAttention", (*DECODER_HEADS, "ForSeq2SeqLM"), INFO)
