# SPDX-License-Identifier: Apache-2.0
"""AdaNorm (Xu et al. 2019): layer normalization whose scale depends on its input and which has no parameters."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAdaNormConfig(XFormerConfig):
    """AdaNorm (Xu et al. 2019): layer normalization whose scale depends on its input and which has no parameters."""

    model_type = "xf_adanorm"

    normalization: SpecLike = "adanorm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="5.2",
    summary="layer norm without parameters, scaled by a function of the normalized value",
    paper="Xu et al. 2019",
    url="https://arxiv.org/abs/1911.07013",
    equation=(
        r"y = \frac{x - \mu}{\sigma}, \qquad z = C \, (1 - k \, y) \odot y, \quad (1 - k \, y) \text{ constant in "
        r"the backward pass}"
    ),
    cost="that of the vanilla Transformer, without its norms' parameters",
    cite="xu2019understanding",
    notes=(
        "Normalizes before the sublayer, as the released models do. sigma is the biased deviation with eps inside "
        "the root; the released code takes the unbiased one and adds eps to it."
    ),
)

make_family(XFAdaNormConfig, "XFAdaNorm", ALL_HEADS, INFO)
