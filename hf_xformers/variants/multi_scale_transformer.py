# SPDX-License-Identifier: Apache-2.0
"""Multi-Scale Transformer (Guo et al. 2020): heads with windows of several widths."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMultiScaleTransformerConfig(XFormerConfig):
    """Multi-Scale Transformer (Guo et al. 2020): heads with windows of several widths."""

    model_type = "xf_multi_scale_transformer"

    hidden_size: int = 300
    num_hidden_layers: int = 3
    num_attention_heads: int = 10
    intermediate_size: int = 1200
    attention: SpecLike = "multi_scale_transformer"


INFO = VariantInfo(
    section="4.6",
    summary="heads have windows of several widths, narrower below",
    paper="Guo et al. 2020",
    url="https://arxiv.org/abs/1912.00544",
    equation=(
        r"\mathrm{head}_h(i) = \mathrm{softmax}_{|i - j| \le w_h}\!\left(\frac{q_i K^\top}{\sqrt{d}}\right) V, \quad"
        r" w_h \in \{1, 3, \tfrac{T}{16}, \tfrac{T}{8}, \tfrac{T}{4}\}"
    ),
    cost="time and memory O(T w D) for heads of the mean scale w, at most T / 4: below T^2 by a constant factor",
    cite="guo2020multi",
    notes=(
        "Scales of whole numbers alone, such as [1, 3, 16, 64], make the time linear. In a decoder, which is not in"
        " the paper, parts of the text are parts of `max_position_embeddings`, or later tokens would widen the windows"
        " of earlier ones."
    ),
)

make_family(XFMultiScaleTransformerConfig, "XFMultiScaleTransformer", ALL_HEADS, INFO)
