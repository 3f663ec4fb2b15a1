# SPDX-License-Identifier: Apache-2.0
"""Talking-heads attention (Shazeer et al. 2020): learned mixing of heads before and after the softmax."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFTalkingHeadsConfig(XFormerConfig):
    """Talking-heads attention (Shazeer et al. 2020): learned mixing of heads before and after the softmax."""

    model_type = "xf_talking_heads"

    attention: SpecLike = "talking_heads"
    cross_attention: SpecLike = "talking_heads"


INFO = VariantInfo(
    section="4.6",
    summary="two learned matrices mix the heads, one before and one after the softmax",
    paper="Shazeer et al. 2020",
    url="https://arxiv.org/abs/2003.02436",
    equation=(
        r"L_h = \sum_k P^l_{kh} \frac{Q_k K_k^\top}{\sqrt d}, \qquad O_v = \Big( \sum_h P^w_{hv} \,"
        r" \mathrm{softmax}(L_h) \Big) V_v"
    ),
    cost="time O(T^2 (D + 2 H^2)) with H heads, memory O(T): scores are made in blocks of queries",
    cite="shazeer2020talking",
)

make_family(XFTalkingHeadsConfig, "XFTalkingHeads", ALL_HEADS, INFO)
