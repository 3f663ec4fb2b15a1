# SPDX-License-Identifier: Apache-2.0
"""Performer (Choromanski et al. 2021): softmax attention in linear time, estimated by positive random features."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFPerformerConfig(XFormerConfig):
    """Performer (Choromanski et al. 2021): softmax attention in linear time, estimated by positive random features."""

    model_type = "xf_performer"

    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "performer"
    cross_attention: SpecLike = "performer"


INFO = VariantInfo(
    section="4.2",
    summary="FAVOR+: the softmax kernel estimated by products of positive orthogonal random features",
    paper="Choromanski et al. 2021",
    url="https://arxiv.org/abs/2009.14794",
    equation=r"o_i = \frac{\phi(q_i) \sum_j \phi(k_j)^\top v_j}{\phi(q_i) \sum_j \phi(k_j)^\top}, \qquad "
    r"\phi(x) = \frac{e^{-|x|^2/2}}{\sqrt m} \left( e^{w_1 x}, \dots, e^{w_m x} \right), \qquad "
    r"\mathbb{E}\, \phi(x) \phi(y)^\top = e^{x y^\top}",
    cost=(
        "time O(T m D) for m random features, memory O(T D); generation keeps H m (d + 1) numbers per layer at any"
        " length"
    ),
    cite="choromanski2021rethinking",
    notes=(
        "There are no attention probabilities, so `attention_probs_dropout_prob` has no effect. Training redraws the"
        " features every `redraw_interval` passes; a compiled model does not, call"
        " `hf_xformers.attention.performer.redraw_features(model)`."
    ),
)

make_family(XFPerformerConfig, "XFPerformer", ALL_HEADS, INFO)
