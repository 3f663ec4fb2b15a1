# SPDX-License-Identifier: Apache-2.0
"""Hard-coded Gaussian attention (You et al. 2020): every head looks at a neighbor, with fixed weights around it."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFHardCodedGaussianConfig(XFormerConfig):
    """Hard-coded Gaussian attention (You et al. 2020): every head looks at a neighbor, with fixed weights around
    it."""

    model_type = "xf_hard_coded_gaussian"

    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = "hard_coded_gaussian"


INFO = VariantInfo(
    section="4.5",
    summary="attention weights are a fixed Gaussian around the token before or after; nothing is compared",
    paper="You et al. 2020",
    url="https://arxiv.org/abs/2005.00742",
    equation=(
        r"o_i = \sum_j \frac{1}{s \sqrt{2 \pi}} \exp\!\left(-\frac{(j - i - o_h)^2}{2 s^2}\right) v_j, \qquad o_h \in"
        r" \{-1, 1\} \text{ (encoder)}, \; \{-1, 0\} \text{ (decoder)}"
    ),
    cost=(
        "time O(T W D) for W = 19 tokens at the default width, memory O(T D); generation keeps the values of 9 tokens"
        " at any length; 2 D^2 parameters less in every layer"
    ),
    cite="you2020hard",
    notes=(
        "Cross-attention stays learned, as in the paper's best models; `cross_attention='hard_coded_gaussian'` fixes"
        " it, too, with `ratio` for the ratio of the lengths. Weights are densities and are not divided by their sum"
        " unless `renormalize` is set, so `attention_probs_dropout_prob` has no effect on them."
    ),
)

make_family(XFHardCodedGaussianConfig, "XFHardCodedGaussian", ALL_HEADS, INFO)
