# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn Transformer (Tay et al. 2020): attention to the own block and to one that is sorted to it."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFSinkhornTransformerConfig(XFormerConfig):
    """Sinkhorn Transformer (Tay et al. 2020): attention to the own block and to one that is sorted to it."""

    model_type = "xf_sinkhorn_transformer"

    attention: SpecLike = "sinkhorn_transformer"


INFO = VariantInfo(
    section="4.1",
    summary="a query reads its own block and one that a learned soft permutation sorts to it",
    paper="Tay et al. 2020",
    url="https://arxiv.org/abs/2002.11296",
    equation=(
        r"o_i = \mathrm{softmax}\Big(\tfrac{1}{\sqrt d}\, q_i [K'_c; K_c]^\top\Big) [V'_c; V_c], \qquad"
        r" K'_c = \sum_u P_{cu} K_u, \quad P = \mathrm{Sinkhorn}\big(R(\bar x) / \tau\big)"
    ),
    cost="time O(T b D + T^2 D / b) with blocks of b tokens, memory O(T (b + D) + (T / b)^2)",
    cite="tay2020sparse",
    notes=(
        "The decoder is strictly causal: only past blocks are sorted to a block, and no row of the permutation knows"
        " a later one. An encoder-decoder has dense cross-attention. `sortcut_blocks` is SortCut. Two differences"
        " from the paper: own and sorted keys stand in one softmax, where it adds the two logits of each pair of"
        " places; and the sorting network reads the mean of a block's tokens in place of their sum. The paper's"
        " mixture of sorted and plain attention is not there."
    ),
)

make_family(XFSinkhornTransformerConfig, "XFSinkhornTransformer", ALL_HEADS, INFO)
