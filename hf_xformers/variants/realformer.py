# SPDX-License-Identifier: Apache-2.0
"""RealFormer (He et al. 2020): attention scores add up from layer to layer."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFRealFormerConfig(XFormerConfig):
    """RealFormer (He et al. 2020): attention scores add up from layer to layer."""

    model_type = "xf_realformer"

    attention: SpecLike = "realformer"
    cross_attention: SpecLike = "realformer"


INFO = VariantInfo(
    section="4.5",
    summary="a residual path carries attention scores from each layer to the next",
    paper="He et al. 2021",
    url="https://arxiv.org/abs/2012.11747",
    equation=r"Z^l = \frac{Q^l (K^l)^\top}{\sqrt d} + Z^{l-1}, \qquad O^l = \mathrm{softmax}(Z^l) \, V^l",
    cost=(
        "time O(T^2 D); the scores passed on take O(T^2) memory up to T = (L + 1) d, with L layers of head width d;"
        " beyond, O(T) memory, and Q K^T costs up to L times as much"
    ),
    cite="he2021realformer",
    notes=(
        "Encoder, decoder and cross-attention have a chain of scores each, which starts anew in every call; generation"
        " needs an ordinary cache only."
    ),
)

make_family(XFRealFormerConfig, "XFRealFormer", ALL_HEADS, INFO)
