# SPDX-License-Identifier: Apache-2.0
"""Decoder without feed-forward (Yang et al. 2020): layers of self-attention and cross-attention alone."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFNoFFNDecoderConfig(XFormerConfig):
    """Decoder without feed-forward (Yang et al. 2020): layers of self-attention and cross-attention alone."""

    model_type = "xf_no_ffn_decoder"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "xavier"
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    feedforward: SpecLike = "relu"
    decoder: dict[str, Any] | None = preset({"block": "no_ffn"})


INFO = VariantInfo(
    section="5.3",
    summary="decoder layers of self-attention and cross-attention alone",
    paper="Yang et al. 2020",
    url="https://arxiv.org/abs/2010.02648",
    equation=(
        r"x \leftarrow \mathrm{LN}(x + \mathrm{SA}(x)), \qquad x \leftarrow \mathrm{LN}(x + \mathrm{XA}(x, "
        r"\text{memory}))"
    ),
    cost="saves 2 T D F time and 2 D F parameters of every decoder layer",
    cite="yang2020sublayer",
)

make_family(XFNoFFNDecoderConfig, "XFNoFFNDecoder", SEQ2SEQ_HEADS, INFO)
