# SPDX-License-Identifier: Apache-2.0
"""Performer, first version (Choromanski et al. 2020): softmax attention estimated by trigonometric random features."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


def _favor() -> dict[str, Any]:
    # Denominators below 1, the weight of a single near key, are within the estimate's own noise once queries and keys
    # are long. Divided by them, models that start from nothing diverge after some fifty steps.
    return {"type": "performer", "feature_kind": "trigonometric", "min_denominator": 1.0}


class XFPerformerV1Config(XFormerConfig):
    """Performer, first version (Choromanski et al. 2020): softmax attention estimated by trigonometric random
    features."""

    model_type = "xf_performer_v1"

    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = field(default_factory=_favor)
    cross_attention: SpecLike = field(default_factory=_favor)


INFO = VariantInfo(
    section="4.2",
    summary="FAVOR: the softmax kernel estimated by sines and cosines of random projections",
    paper="Choromanski et al. 2020",
    url="https://arxiv.org/abs/2006.03555",
    equation=r"o_i = \frac{\phi(q_i) \sum_j \phi(k_j)^\top v_j}{\phi(q_i) \sum_j \phi(k_j)^\top}, \qquad "
    r"\phi(x) = \frac{e^{|x|^2/2}}{\sqrt m} \left( \cos w_1 x, \dots, \cos w_m x, \sin w_1 x, \dots, \sin w_m x"
    r" \right), \qquad \mathbb{E}\, \phi(x) \phi(y)^\top = e^{x y^\top}",
    cost=(
        "time O(T m D) for m random rows, memory O(T D); generation keeps 2 H m (d + 1) numbers per layer at any"
        " length"
    ),
    cite="choromanski2020masked",
    notes=(
        "Estimated weights can be negative, and their relative error grows where a weight is small: sums of them may"
        " come near zero, for which the positive features of `xf_performer` were made. Denominators are kept"
        " `min_denominator` away from zero, relative to the largest factor of a key: 1 here, which models that start"
        " from nothing need to learn; a smaller one stays closer to the estimate. There are no attention"
        " probabilities, so `attention_probs_dropout_prob` has no effect. Training redraws the features every"
        " `redraw_interval` passes; a compiled model does not, call"
        " `hf_xformers.attention.performer.redraw_features(model)`."
    ),
)

make_family(XFPerformerV1Config, "XFPerformerV1", ALL_HEADS, INFO)
