# SPDX-License-Identifier: Apache-2.0
"""Mask attention network (Fan et al. 2021): attention with dynamic masks before self-attention."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMaskAttentionNetworkConfig(XFormerConfig):
    """Mask attention network (Fan et al. 2021): attention with dynamic masks before self-attention.

    The released recipe of the small translation model has dynamic masks in the encoder alone:
    `decoder={"block": "vanilla"}`.
    """

    model_type = "xf_mask_attention_network"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 1024
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"
    block: SpecLike = "mask_attention_network"


INFO = VariantInfo(
    section="6.5",
    summary="attention with dynamic masks first",
    paper="Fan et al. 2021",
    url="https://arxiv.org/abs/2103.13597",
    equation=(
        r"A_{ij} = \frac{M_{ij} \exp(q_i k_j^\top / \sqrt d)}{\sum_l M_{il} \exp(q_i k_l^\top / \sqrt d)}, \qquad"
        r" M_{ij} = \sigma(x_i W + P_{i-j} + U_h)"
    ),
    cost="two attentions in a layer: time O(2 T^2 D), memory O(T D)",
    notes=(
        "The layer is dynamic mask attention, self-attention (masks of ones) and a feed-forward of half the usual"
        " width (the identity as a mask). Heads of the first are rectified before their output projection, as in the"
        " released code. Distances from 1024 on share a number."
    ),
    cite="fan2021mask",
)

make_family(XFMaskAttentionNetworkConfig, "XFMaskAttentionNetwork", ALL_HEADS, INFO)
