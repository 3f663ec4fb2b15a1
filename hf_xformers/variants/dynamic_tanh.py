# SPDX-License-Identifier: Apache-2.0
"""Dynamic tanh (Zhu et al. 2025): a Transformer without normalization."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDynamicTanhConfig(XFormerConfig):
    """Dynamic tanh (Zhu et al. 2025): a Transformer without normalization."""

    model_type = "xf_dynamic_tanh"

    normalization: SpecLike = "dynamic_tanh"
    residual: SpecLike = "pre_ln"


INFO = VariantInfo(
    section="successors",
    summary="a tanh with a learned scale replaces every norm",
    paper="Zhu et al. 2025",
    url="https://arxiv.org/abs/2503.10622",
    equation=r"\mathrm{DyT}(x) = w \odot \tanh(\alpha x) + b",
    cost="that of the vanilla Transformer, without statistics over the width",
    cite="zhu2025transformers",
    notes=(
        "A model that was trained with a norm is not one with dynamic tanh: there is no exact conversion. With"
        " `--normalization.bias false` and rotary positions it has the shape of the authors' language models, without"
        " the learned factor behind their embedding."
    ),
)

make_family(XFDynamicTanhConfig, "XFDynamicTanh", ALL_HEADS, INFO)
