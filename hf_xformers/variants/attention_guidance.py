# SPDX-License-Identifier: Apache-2.0
"""Attention guidance (Deshpande & Narasimhan 2020): some heads are drawn to simple patterns."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAttentionGuidanceConfig(XFormerConfig):
    """Attention guidance (Deshpande & Narasimhan 2020): some heads are drawn to simple patterns.

    Of twelve heads one is drawn to the next token (in a decoder none), one to the previous and four to the first.

    The pull on each token goes with the loss's `weight` divided by the number of tokens: the paper's 100 on texts of
    512 is 25 on 128. Together with a high learning rate a strong pull takes out of the states what tells tokens apart,
    as positions alone serve the patterns; if a model learns no more than the frequencies of tokens, lower either, and
    give less to more layers.
    """

    model_type = "xf_attention_guidance"

    attention: SpecLike = preset({"type": "dense", "losses": ["attention_guidance"]})


INFO = VariantInfo(
    section="4.6",
    summary="an auxiliary loss draws some heads to the next, the previous and the first token",
    paper="Deshpande and Narasimhan 2020",
    url="https://arxiv.org/abs/2010.02399",
    equation=(
        r"\mathcal L = \mathcal L_{\text{task}} + \alpha_t \sum_{l, p} \mathrm{mean}\big( (A^l_{h(p)} - P_p)^2 \big)"
    ),
    cost=(
        "time O(T^2 D), memory O(T D): the weights of guided heads are made in blocks of queries, in training alone"
    ),
    cite="deshpande2020guiding",
)

make_family(XFAttentionGuidanceConfig, "XFAttentionGuidance", ALL_HEADS, INFO)
