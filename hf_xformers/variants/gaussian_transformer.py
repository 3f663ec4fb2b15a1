# SPDX-License-Identifier: Apache-2.0
"""Gaussian Transformer (Guo et al. 2019): scores fall with the square of the distance, at a learned rate."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFGaussianTransformerConfig(XFormerConfig):
    """Gaussian Transformer (Guo et al. 2019): scores fall with the square of the distance, at a learned rate."""

    model_type = "xf_gaussian_transformer"

    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = preset({"type": "combined", "parts": ("sinusoidal_absolute", "gaussian_transformer")})


INFO = VariantInfo(
    section="4.5",
    summary="a Gaussian of the distance is a factor on every attention weight, its width learned by each head",
    paper="Guo et al. 2019",
    url="https://doi.org/10.1609/aaai.v33i01.33016489",
    equation=(
        r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt d} + G\right) V, \qquad G_{ij} = -\left| w \, (i - j)^2 + b"
        r" \right|, \quad w > 0, \; b < 0"
    ),
    cost="time O(T^2 D), memory O(T): the prior is a number for each distance; two parameters per head and layer",
    cite="guo2019gaussian",
    notes=(
        "The encoding block's attention; the paper's interaction and comparison blocks for sentence pairs are not part"
        " of it. The prior is the same to both sides, so order comes from sinusoids at the input. Its rates start at 1"
        " / `max_position_embeddings` and are in `raw_scale` and `raw_offset`. Cross-attention has no prior."
    ),
)

make_family(XFGaussianTransformerConfig, "XFGaussianTransformer", ALL_HEADS, INFO)
