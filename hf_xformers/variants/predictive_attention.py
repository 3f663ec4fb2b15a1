# SPDX-License-Identifier: Apache-2.0
"""Evolving attention (Wang et al. 2021): a convolution over the scores of one layer predicts those of the next."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFPredictiveAttentionConfig(XFormerConfig):
    """Evolving attention (Wang et al. 2021): a convolution over the scores of one layer predicts those of the next."""

    model_type = "xf_predictive_attention"

    attention: SpecLike = "predictive_attention"


INFO = VariantInfo(
    section="4.5",
    summary="scores mixed with those of the layer below and convolved",
    paper="Wang et al. 2021",
    url="https://arxiv.org/abs/2102.12895",
    equation=(
        r"I^l = (1 - \beta) \frac{Q^l (K^l)^\top}{\sqrt d} + \beta Z^{l-1}, \qquad Z^l = (1 - \alpha) I^l + \alpha f("
        r"\mathrm{conv}(I^l)), \qquad O^l = \mathrm{softmax}(Z^l) V^l"
    ),
    cost=(
        "time O(T^2 (D + k^2 H^2)) for kernels of k x k and H heads; memory O(H T^2) in every layer; generation keeps"
        " the last k - 1 rows of scores of every layer next to keys and values"
    ),
    cite="wang2021evolving",
    notes=(
        "The earlier Predictive Attention Transformer is `attention={'type': 'predictive_attention', 'form': 'pat'}`."
        " In a decoder the convolution reads no row of a later token, and cross-attention is dense unless"
        " `cross_attention` says otherwise."
    ),
)

make_family(XFPredictiveAttentionConfig, "XFPredictiveAttention", ALL_HEADS, INFO)
