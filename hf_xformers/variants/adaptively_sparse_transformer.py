# SPDX-License-Identifier: Apache-2.0
"""Adaptively Sparse Transformer (Correia et al. 2019): alpha-entmax attention with learned alphas."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAdaptivelySparseTransformerConfig(XFormerConfig):
    """Adaptively Sparse Transformer (Correia et al. 2019): alpha-entmax attention with learned alphas."""

    model_type = "xf_adaptively_sparse_transformer"

    attention: SpecLike = "adaptively_sparse"
    cross_attention: SpecLike = "adaptively_sparse"


INFO = VariantInfo(
    section="",
    summary="weights by alpha-entmax, alpha learned by each head",
    paper="Correia et al. 2019",
    url="https://arxiv.org/abs/1909.00015",
    equation=(
        r"o_i = \sum_j p_{ij} v_j, \qquad"
        r" p_i = \Big[(\alpha - 1) \frac{K q_i}{\sqrt d} - \tau_i\Big]_+^{1 / (\alpha - 1)}, \qquad"
        r" \alpha = 1 + \sigma(a_h), \quad \tau_i : \textstyle\sum_j p_{ij} = 1"
    ),
    cost=(
        "time O(T^2 D), as softmax attention, and about eight powers per score; O(T) memory, as scores are made for a"
        " block of queries at a time"
    ),
    cite="correia2019adaptively",
    notes=(
        "`alpha=1.5` and `alpha=2` (sparsemax) for all heads are exact, from sorted scores. Weights that are zero"
        " save no time: which they are is known when all scores are. In float32 the derivative of alpha is a"
        " difference of nearly equal numbers where alpha is near 1: off by about a tenth at 1.01, the least alpha,"
        " and right from 1.05 on."
    ),
)

make_family(XFAdaptivelySparseTransformerConfig, "XFAdaptivelySparseTransformer", ALL_HEADS, INFO)
