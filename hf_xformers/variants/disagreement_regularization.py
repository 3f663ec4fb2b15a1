# SPDX-License-Identifier: Apache-2.0
"""Disagreement regularization (Li et al. 2018): heads are paid for reading different things."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDisagreementRegularizationConfig(XFormerConfig):
    """Disagreement regularization (Li et al. 2018): heads are paid for reading different things.

    The loss is that on what heads have read (`of=("output",)`); any attention that hands out its heads takes it as
    `losses=["disagreement_regularization"]`.
    """

    model_type = "xf_disagreement_regularization"

    attention: SpecLike = preset({"type": "dense", "losses": ["disagreement_regularization"]})
    cross_attention: SpecLike = preset({"type": "dense", "losses": ["disagreement_regularization"]})


INFO = VariantInfo(
    section="4.6",
    summary="a loss keeps the heads of a layer from reading alike",
    paper="Li et al. 2018",
    url="https://arxiv.org/abs/1810.10183",
    equation=(
        r"\mathcal L = \mathcal L_{\text{task}} + \lambda \frac{1}{H^2} \sum_{i, j}"
        r" \frac{O_i \cdot O_j}{\lVert O_i \rVert \lVert O_j \rVert}"
    ),
    cost="time O(T^2 D), memory O(T D), as dense attention; the loss is O(T D) time, in training alone",
    cite="li2018multihead",
)

make_family(XFDisagreementRegularizationConfig, "XFDisagreementRegularization", ALL_HEADS, INFO)
