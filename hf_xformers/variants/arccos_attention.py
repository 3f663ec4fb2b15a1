# SPDX-License-Identifier: Apache-2.0
"""Arc-cosine attention (Choromanski et al. 2021, Peng et al. 2021): random ReLU features instead of a softmax."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFArccosAttentionConfig(XFormerConfig):
    """Arc-cosine attention (Choromanski et al. 2021, Peng et al. 2021): random ReLU features instead of a softmax."""

    model_type = "xf_arccos_attention"

    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "arccos_attention"
    cross_attention: SpecLike = "arccos_attention"


INFO = VariantInfo(
    section="4.2",
    summary="the arc-cosine kernel instead of a softmax, estimated by random ReLU features",
    paper="Choromanski et al. 2021",
    url="https://arxiv.org/abs/2009.14794",
    equation=r"o_i = \frac{\phi(q_i) \sum_j \phi(k_j)^\top v_j}{\phi(q_i) \sum_j \phi(k_j)^\top}, \qquad "
    r"\phi(x) = \frac{1}{\sqrt m} \max(W x, 0) + \epsilon, \qquad W_{rs} \sim \mathcal{N}(0, 1)",
    cost=(
        "time O(T m D) for m random features, memory O(T D); generation keeps H m (d + 1) numbers per layer at any"
        " length"
    ),
    cite="choromanski2021rethinking",
    notes=(
        "`num_features=None` leaves the projection out, as the released Performer-ReLU does by default;"
        " `normalize_qk=True` is RFA-arccos (Peng et al. 2021). There are no attention probabilities, so"
        " `attention_probs_dropout_prob` has no effect. The random rows stay as they are drawn unless"
        " `redraw_interval` is set."
    ),
)

make_family(XFArccosAttentionConfig, "XFArccosAttention", ALL_HEADS, INFO)
