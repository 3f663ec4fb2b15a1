# SPDX-License-Identifier: Apache-2.0
"""Sparse Transformer (Child et al. 2019): factorized attention in O(T sqrt(T))."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFSparseTransformerConfig(XFormerConfig):
    """Sparse Transformer (Child et al. 2019): factorized attention in O(T sqrt(T))."""

    model_type = "xf_sparse_transformer"

    hidden_size: int = 512
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 12288
    attention_probs_dropout_prob: float | int = 0.0
    hidden_dropout_prob: float | int = 0.4
    initializer: Initializer = "fan_in"
    initializer_factor: float | int = 0.125
    tie_word_embeddings: bool = False
    # The standard deviation of positions is 0.125 / sqrt(n D), for the n = 2 vectors of a row and a column.
    position: SpecLike = preset({"type": "axial", "combine": "sum", "std": 0.125 / 1024**0.5})
    attention: SpecLike = "sparse_transformer"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "sigmoid"})
    head: SpecLike = preset({"type": "linear", "from_zero": True})


INFO = VariantInfo(
    section="4.1",
    summary="each token reads its surroundings and every l-th or a few summary tokens; two steps reach every token",
    paper="Child et al. 2019",
    url="https://arxiv.org/abs/1904.10509",
    equation=r"o_i = \mathrm{softmax}_{A_1(i) \cup A_2(i)}\!\left(\frac{q_i K^\top}{\sqrt{d}}\right) V, \quad "
    r"A_1(i) = \{j \le i : \lfloor j / l \rfloor = \lfloor i / l \rfloor\}, \quad A_2(i) = \{j \le i : j \bmod l \ge l"
    r" - c\}",
    cost=(
        "time and memory O(T (l + c T / l) D), which is O(T sqrt(T) D) where T is near max_position_embeddings: l is"
        " its root"
    ),
    cite="child2019generating",
    notes=(
        "Sizes and dropout are those for enwik8. There the fixed pattern had l = 128, c = 32 (attention fields stride"
        " and summary_width); the default is l = sqrt(max_position_embeddings), c = 8. kind='strided' is the pattern"
        " for images. A token's position is the sum of a row's and a column's vector in a grid of l columns; images"
        " take position={'type': 'axial', 'combine': 'sum', 'shape': (height, width, channels)}. Weights start as in"
        " the paper, the output at zero. Encoders are not in the paper."
    ),
)

make_family(XFSparseTransformerConfig, "XFSparseTransformer", ALL_HEADS, INFO)
