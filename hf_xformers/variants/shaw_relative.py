# SPDX-License-Identifier: Apache-2.0
"""Relative position representations (Shaw et al. 2018): a learned vector per clipped distance."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFShawRelativeConfig(XFormerConfig):
    """Relative position representations (Shaw et al. 2018): a learned vector per clipped distance."""

    model_type = "xf_shaw_relative"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "shaw_relative"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="5.1",
    summary="keys and values gain a learned vector per clipped distance",
    paper="Shaw et al. 2018",
    url="https://arxiv.org/abs/1803.02155",
    equation=(
        r"e_{ij} = \frac{q_i (k_j + a^K_{c(j-i)})^\top}{\sqrt d}, \qquad o_i = \sum_j \alpha_{ij} (v_j +"
        r" a^V_{c(j-i)}), \qquad c(x) = \mathrm{clip}(x, -k, k)"
    ),
    cost="time O(T^2 D + T k D), memory O(T): scores are made in blocks of queries",
    cite="shaw2018self",
)

make_family(XFShawRelativeConfig, "XFShawRelative", ALL_HEADS, INFO)
