# SPDX-License-Identifier: Apache-2.0
"""Collaborative attention (Cordonnier et al. 2020): heads share queries and keys and mix their channels."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFCollaborativeAttentionConfig(XFormerConfig):
    """Collaborative attention (Cordonnier et al. 2020): heads share queries and keys and mix their channels.

    At its start it is multi-head attention; `shared_width` below the width of all heads saves parameters. A trained
    model becomes one by `swap_components(model, attention={"type": "collaborative_attention", "shared_width": 384})`.
    """

    model_type = "xf_collaborative_attention"

    attention: SpecLike = "collaborative_attention"
    cross_attention: SpecLike = "collaborative_attention"


INFO = VariantInfo(
    section="4.6",
    summary="heads share and reweigh one query and key projection",
    paper="Cordonnier et al. 2020",
    url="https://arxiv.org/abs/2006.16362",
    equation=(
        r"A_h = \mathrm{softmax}\Big( \frac{(X \tilde W^q \odot m_h) (X \tilde W^k)^\top + \mathbf 1 (X c_h)^\top}"
        r"{\sqrt d} \Big), \qquad O_h = A_h X W^v_h"
    ),
    cost="time O(T^2 H K) with H heads and K shared channels, memory O(T): scores are made in blocks of queries",
    cite="cordonnier2020multihead",
)

make_family(XFCollaborativeAttentionConfig, "XFCollaborativeAttention", ALL_HEADS, INFO)
