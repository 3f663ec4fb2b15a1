# SPDX-License-Identifier: Apache-2.0
"""Linear Transformer (Katharopoulos et al. 2020): weights are products of features, so a decoder is a recurrent
network."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLinearTransformerConfig(XFormerConfig):
    """Linear Transformer (Katharopoulos et al. 2020): weights are products of features, so a decoder is a recurrent
    network."""

    model_type = "xf_linear_transformer"

    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    intermediate_size: int = 1024
    max_position_embeddings: int = 3072
    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "linear_transformer"
    cross_attention: SpecLike = "linear_transformer"


INFO = VariantInfo(
    section="4.2",
    summary="the softmax of scores becomes a product of features elu(x) + 1, summed once for all queries",
    paper="Katharopoulos et al. 2020",
    url="https://arxiv.org/abs/2006.16236",
    equation=(
        r"o_i = \frac{\phi(q_i) \sum_j \phi(k_j)^\top v_j}{\phi(q_i) \sum_j \phi(k_j)^\top}, \qquad \phi(x) ="
        r" \mathrm{elu}(x) + 1"
    ),
    cost=(
        "time O(T D d) for heads of width d, memory O(T D); generation keeps H d (d + 1) numbers per layer at any"
        " length"
    ),
    cite="katharopoulos2020transformers",
    notes="There are no attention probabilities, so `attention_probs_dropout_prob` has no effect.",
)

make_family(XFLinearTransformerConfig, "XFLinearTransformer", ALL_HEADS, INFO)
