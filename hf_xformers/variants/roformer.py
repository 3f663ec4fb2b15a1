# SPDX-License-Identifier: Apache-2.0
"""RoFormer (Su et al. 2021): queries and keys rotated by their position."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFRoformerConfig(XFormerConfig):
    """RoFormer (Su et al. 2021): queries and keys rotated by their position."""

    model_type = "xf_roformer"

    vocab_size: int = 50000
    max_position_embeddings: int = 1536
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    head: SpecLike = "transform"
    position: SpecLike = preset({"type": "rotary", "layout": "interleaved"})


INFO = VariantInfo(
    section="5.1",
    summary="rotary positions: a score depends on the distance only",
    paper="Su et al. 2021",
    url="https://arxiv.org/abs/2104.09864",
    equation=r"\mathrm{softmax}_j\!\left(\frac{(x_i W^Q) R_{i-j} (x_j W^K)^\top}{\sqrt d}\right)",
    cost="time O(T^2 D), memory O(T D) with fused kernels; O(T) with linear attention",
    cite="su2024roformer",
    notes=(
        "Also with linear attention (section 3.3): `attention='linear_transformer'` rotates the features of the"
        " numerator alone."
    ),
)

make_family(XFRoformerConfig, "XFRoformer", ALL_HEADS, INFO)
