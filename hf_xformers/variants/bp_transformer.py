# SPDX-License-Identifier: Apache-2.0
"""BP-Transformer (Ye et al. 2019): near tokens one by one, and far ones as ever longer spans."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFBPTransformerConfig(XFormerConfig):
    """BP-Transformer (Ye et al. 2019): near tokens one by one, and far ones as ever longer spans."""

    model_type = "xf_bp_transformer"

    add_pooler: bool = True
    position: SpecLike = "none"
    attention: SpecLike = "bp_transformer"
    block: SpecLike = "bp_transformer"


INFO = VariantInfo(
    section="4.1",
    summary="a token reads its neighbors, and spans that are the longer the farther away they are",
    paper="Ye et al. 2019",
    url="https://arxiv.org/abs/1911.04070",
    equation=(
        r"o_i = \sum_{j \in N(i)} \mathrm{softmax}_{N(i)}\!\left(\frac{q_i \cdot (k_j + a_{ij})}{\sqrt{d}}\right) v_j,"
        r" \quad o_u = \sum_{j \in u} \mathrm{softmax}\!\left(\frac{q_u \cdot k_j}{\sqrt{d}}\right) v_j"
    ),
    cost="time O(k T log(T / k) D) with k nodes of each level (4), and projections of 2 T nodes; memory O(T D)",
    cite="ye2019bp",
    notes=(
        "The spans of a text have states of their own, and go through all layers next to the tokens; a text is"
        " classified by the root, the span of the whole. A decoder reads spans of past tokens alone. The decoder of an"
        " encoder-decoder reads the encoder's tokens, where the released code reads its spans, too. `nodes_per_level`"
        " is k."
    ),
)

make_family(XFBPTransformerConfig, "XFBPTransformer", ALL_HEADS, INFO)
