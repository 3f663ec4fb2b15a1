# SPDX-License-Identifier: Apache-2.0
"""FLOATER (Liu et al. 2020): positions from a learned differential equation, in every layer."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFFloaterConfig(XFormerConfig):
    """FLOATER (Liu et al. 2020): positions from a learned differential equation, in every layer."""

    model_type = "xf_floater"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "floater"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="5.1",
    summary="queries, keys and values gain the solution of a learned differential equation at the token's place",
    paper="Liu et al. 2020",
    url="https://arxiv.org/abs/2003.09229",
    equation=r"p(t) = p(0) + \int_0^t f_\theta(s, p(s))\, ds, \qquad q_i = x_i W^Q + b^Q(t_i), \dots",
    cost="time O(T^2 D) and T solver steps one after the other, once per call; memory O(T D) with fused kernels",
    cite="liu2020learning",
    notes=(
        "The decoder's cross-attention stays plain. With `translation_invariant` the equation does not read the time,"
        " so that the way from a position to the next is the same everywhere."
    ),
)

make_family(XFFloaterConfig, "XFFloater", ALL_HEADS, INFO)
