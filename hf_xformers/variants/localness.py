# SPDX-License-Identifier: Apache-2.0
"""Localness modeling (Yang et al. 2018): every query predicts a window of the text, which scores fall away from."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLocalnessConfig(XFormerConfig):
    """Localness modeling (Yang et al. 2018): every query predicts a window of the text, which scores fall away
    from."""

    model_type = "xf_localness"

    embedding: SpecLike = preset({"type": "token", "scale": True})
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = "localness"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="4.5",
    summary="the weights of lower layers are multiplied by a Gaussian with predicted center and width",
    paper="Yang et al. 2018",
    url="https://arxiv.org/abs/1810.10182",
    equation=(
        r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt d} + G\right) V, \qquad G_{ij} = -\frac{2 (j - P_i)^2}{D_i^2},"
        r" \quad P_i = I \, \sigma(u_P \tanh(q_i W)), \; D_i = I \, \sigma(u_D \tanh(q_i W))"
    ),
    cost=(
        "time O(T^2 D), memory O(T): scores are made in blocks of queries; d^2 + 2 H d parameters in each layer with"
        " windows"
    ),
    cite="yang2018modeling",
    notes=(
        "I is the number of real tokens of a text, in a decoder of those up to the query, as its length is not known"
        " yet. The lower half of the layers has windows (`layers`), the others are dense; `window` chooses windows of"
        " the query, of the layer (encoders only), or of fixed width."
    ),
)

make_family(XFLocalnessConfig, "XFLocalness", ALL_HEADS, INFO)
