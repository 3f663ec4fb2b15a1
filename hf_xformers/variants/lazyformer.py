# SPDX-License-Identifier: Apache-2.0
"""LazyFormer (Ying et al. 2021): several layers share one attention map."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLazyFormerConfig(XFormerConfig):
    """LazyFormer (Ying et al. 2021): several layers share one attention map."""

    model_type = "xf_lazyformer"

    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "lazyformer"
    cross_attention: SpecLike = "lazyformer"


INFO = VariantInfo(
    section="4.5",
    summary="layers stand in blocks; only the first of a block compares tokens, the others reuse its attention map",
    paper="Ying et al. 2021",
    url="https://arxiv.org/abs/2102.12702",
    equation=(
        r"A = \mathrm{softmax}\!\left(\frac{Q^b (K^b)^\top}{\sqrt d}\right), \qquad O^l = A V^l \text{ for all"
        r" layers } l \text{ of block } b"
    ),
    cost=(
        "time O(T^2 D), with the products Q K^T in one of m layers up to 1024 tokens (memory O(T^2)) and in every"
        " layer beyond (memory O(T)); 2 D^2 parameters less in all layers of a block but the first"
    ),
    cite="ying2021lazyformer",
    notes=(
        "Blocks have two layers (`block_size`); self- and cross-attention have a map each. Attention dropout is off,"
        " as in the paper's pretraining: with it, the dropped map is shared and is kept at every length."
    ),
)

make_family(XFLazyFormerConfig, "XFLazyFormer", ALL_HEADS, INFO)
