# SPDX-License-Identifier: Apache-2.0
"""Complex word embeddings (Wang et al. 2020): a word is a function of its place, and so is everything above it."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFComplexOrderConfig(XFormerConfig):
    """Complex word embeddings (Wang et al. 2020): a word is a function of its place, and so is everything above it."""

    model_type = "xf_complex_order"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    tie_word_embeddings: bool = False
    embedding: SpecLike = "complex_order"
    position: SpecLike = "none"
    attention: SpecLike = "complex_order"
    cross_attention: SpecLike = "complex_order"
    normalization: SpecLike = "complex_parts"
    feedforward: SpecLike = "complex_parts"


INFO = VariantInfo(
    section="5.1",
    summary="each channel of a word turns with its place at the word's own frequency; states are complex",
    paper="Wang et al. 2020",
    url="https://arxiv.org/abs/1912.12333",
    equation=(
        r"f(w, t) = r_w \odot e^{i \omega_w t}, \qquad \mathrm{softmax}_j\!\left(\frac{|\sum_c q_{ic} k_{jc}|}{\sqrt"
        r" d}\right)"
    ),
    cost="time O(T^2 D), memory O(T): scores are made in blocks of queries",
    cite="wang2020encoding",
    notes=(
        "`hidden_size` counts real and imaginary parts together. The output table is its own: input tables hold"
        " amplitudes and frequencies."
    ),
)

make_family(XFComplexOrderConfig, "XFComplexOrder", ALL_HEADS, INFO)
