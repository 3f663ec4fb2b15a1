# SPDX-License-Identifier: Apache-2.0
"""Routing Transformer (Roy et al. 2021): half of the heads attend inside clusters found by online k-means."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFRoutingTransformerConfig(XFormerConfig):
    """Routing Transformer (Roy et al. 2021): half of the heads attend inside clusters found by online k-means."""

    model_type = "xf_routing_transformer"

    hidden_size: int = 1024
    num_hidden_layers: int = 10
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 4096
    position: SpecLike = "rotary"
    attention: SpecLike = "routing_transformer"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="4.1",
    summary="local heads with relative positions, and heads that attend inside k-means clusters",
    paper="Roy et al. 2021",
    url="https://arxiv.org/abs/2003.05997",
    equation=(
        r"o_i = \sum_{j : \mu(k_j) = \mu(q_i)} \mathrm{softmax}_j\!\left(\frac{\tilde q_i \cdot \tilde k_j}{\sqrt{d}}"
        r"\right) v_j, \quad \mu(x) = \arg\max_c \tilde x \cdot \mu_c, \quad \tilde x = \mathrm{LN}(x)"
    ),
    cost=(
        "time O(T^{1.5} D) in sqrt(T) clusters of sqrt(T) tokens, as many as each text needs; no trained parameters"
        " besides the projections"
    ),
    cite="roy2021routing",
    notes=(
        "Decoders read the most recent tokens of their own cluster, so that they can generate; the paper's balanced"
        " clusters, which look at the whole text, are what encoders use, and attention field causal_form='paper' in"
        " decoders. Rotary positions stand for the paper's relative ones, in the local heads."
    ),
)

make_family(XFRoutingTransformerConfig, "XFRoutingTransformer", ALL_HEADS, INFO)
