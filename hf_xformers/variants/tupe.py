# SPDX-License-Identifier: Apache-2.0
"""TUPE (Ke et al. 2021): positions attend to positions, untied from words, and [CLS] has no place."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFTupeConfig(XFormerConfig):
    """TUPE (Ke et al. 2021): positions attend to positions, untied from words, and [CLS] has no place."""

    model_type = "xf_tupe"

    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    head: SpecLike = "transform"
    position: SpecLike = "tupe"


INFO = VariantInfo(
    section="5.1",
    summary="score terms of positions alone, with projections of their own",
    paper="Ke et al. 2021",
    url="https://arxiv.org/abs/2006.15595",
    equation=r"\frac{(x_i W^Q)(x_j W^K)^\top + (p_i U^Q)(p_j U^K)^\top}{\sqrt{2d}} + b_{j-i}",
    cost="time O(T^2 D), memory O(T): scores are made in blocks of queries",
    cite="ke2021rethinking",
)

make_family(XFTupeConfig, "XFTupe", ALL_HEADS, INFO)
