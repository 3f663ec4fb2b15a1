# SPDX-License-Identifier: Apache-2.0
"""Capsule heads (Gu & Feng 2019): heads are capsules, joined by dynamic or EM routing."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFCapsuleHeadsConfig(XFormerConfig):
    """Capsule heads (Gu & Feng 2019): heads are capsules, joined by dynamic or EM routing."""

    model_type = "xf_capsule_heads"

    attention: SpecLike = preset({"type": "dense", "aggregation": "capsule_heads"})
    cross_attention: SpecLike = preset({"type": "dense", "aggregation": "capsule_heads"})


INFO = VariantInfo(
    section="4.6",
    summary="heads are capsules that vote for the parts of a layer's output",
    paper="Gu and Feng 2019",
    url="https://arxiv.org/abs/1909.00188",
    equation=(
        r"V_{hn} = O_h W_{hn}, \quad c_h = \mathrm{softmax}_n(b_h), \quad"
        r" \Omega_n = \mathrm{squash}\Big( \sum_h c_{hn} V_{hn} \Big), \quad"
        r" b_{hn} \leftarrow b_{hn} + \Omega_n \cdot V_{hn}"
    ),
    cost="time O(T^2 D + T D^2), memory O(T D): votes are made for some tokens at a time",
    cite="gu2019improving",
)

make_family(XFCapsuleHeadsConfig, "XFCapsuleHeads", ALL_HEADS, INFO)
