# SPDX-License-Identifier: Apache-2.0
"""Luna (Ma et al. 2021): a short memory, packed from the text in every layer, is what tokens read."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLunaConfig(XFormerConfig):
    """Luna (Ma et al. 2021): a short memory, packed from the text in every layer, is what tokens read."""

    model_type = "xf_luna"

    attention: SpecLike = "luna"
    cross_attention: SpecLike = "luna"


INFO = VariantInfo(
    section="4.3",
    summary="attention nested through a short memory of learned vectors that travels through the layers",
    paper="Ma et al. 2021",
    url="https://arxiv.org/abs/2106.01540",
    equation=(
        r"Y_P = \mathrm{Attn}(P, X, X), \qquad Y_X = \mathrm{Attn}(X, Y_P, Y_P), \qquad P' = \mathrm{LN}(P + Y_P)"
    ),
    cost=(
        "time O(T l D) for l memory vectors, memory O(T (D + H l)); generation keeps about l D numbers per layer at"
        " any length"
    ),
    cite="ma2021luna",
    notes=(
        "A decoder has the causal form of section 3.4, in which the memory is the same in all layers; cross-attention"
        " packs the encoder's text."
    ),
)

make_family(XFLunaConfig, "XFLuna", ALL_HEADS, INFO)
