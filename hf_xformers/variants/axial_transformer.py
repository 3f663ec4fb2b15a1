# SPDX-License-Identifier: Apache-2.0
"""Axial Transformer (Ho et al. 2019): rows and columns of a grid attend by turns."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAxialTransformerConfig(XFormerConfig):
    """Axial Transformer (Ho et al. 2019): rows and columns of a grid attend by turns."""

    model_type = "xf_axial_transformer"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {"tiny": {"num_hidden_layers": 4}}  # outer and inner layers

    hidden_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    intermediate_size: int = 2048
    max_position_embeddings: int = 4096
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "axial_transformer"
    position: SpecLike = preset({"type": "axial", "combine": "sum", "std": 0.02})
    residual: SpecLike = "pre_ln"
    stack: SpecLike = "axial_transformer"


INFO = VariantInfo(
    section="4.1",
    summary="a text or an image as a grid, whose rows and columns attend one after the other",
    paper="Ho et al. 2019",
    url="https://arxiv.org/abs/1912.12180",
    equation=(
        r"u = \mathrm{Col}_{\mathrm{masked}}(\mathrm{Row}(x)), \quad h = \mathrm{Row}_{\mathrm{masked}}(x +"
        r" \mathrm{down}(u)); \quad N_{\mathrm{Row}}(i) = \{j : \lfloor j / C \rfloor = \lfloor i / C \rfloor\}, \quad"
        r" N_{\mathrm{Col}}(i) = \{j : j \equiv i \bmod C\}"
    ),
    cost="time and memory O(T (R + C) D) for R rows and C columns, which is O(T sqrt(T) D) for a square",
    cite="ho2019axial",
    notes=(
        "Sizes are those for ImageNet-64. The grid has sqrt(max_position_embeddings) columns unless the attention's"
        " `columns` says otherwise. An encoder has rows in even and columns in odd layers, or both in each"
        " (sum_axial=True). In a decoder half of the layers read whole rows and columns of the rows above, the others"
        " a token's own row up to itself, so that every token reads all earlier ones. The paper's outer encoders for"
        " several channels are not part of it."
    ),
)

make_family(XFAxialTransformerConfig, "XFAxialTransformer", ALL_HEADS, INFO)
