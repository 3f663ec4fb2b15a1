# SPDX-License-Identifier: Apache-2.0
"""Music Transformer (Huang et al. 2019): relative attention over the past, its terms placed by skewing."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFMusicTransformerConfig(XFormerConfig):
    """Music Transformer (Huang et al. 2019): relative attention over the past, its terms placed by skewing."""

    model_type = "xf_music_transformer"

    hidden_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 1024
    max_position_embeddings: int = 2048
    is_decoder: bool = True
    position: SpecLike = "music_transformer"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="5.1",
    summary="scores gain the query times a learned vector per distance to the past",
    paper="Huang et al. 2019",
    url="https://arxiv.org/abs/1809.04281",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top + \mathrm{skew}(Q E^{r\top})}{\sqrt d}\right) V",
    cost="time O(T^2 D), memory O(T): scores are made in blocks of queries",
    cite="huang2019music",
)

make_family(XFMusicTransformerConfig, "XFMusicTransformer", DECODER_HEADS, INFO)
