# SPDX-License-Identifier: Apache-2.0
"""Conditional positional encoding (Chu et al. 2021): a depthwise convolution tells tokens where they stand."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFCpeConfig(XFormerConfig):
    """Conditional positional encoding (Chu et al. 2021): a depthwise convolution tells tokens where they stand."""

    model_type = "xf_cpe"

    hidden_size: int = 384
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    position: SpecLike = "none"
    residual: SpecLike = "pre_ln"
    block: SpecLike = "cpe"


INFO = VariantInfo(
    section="5.1",
    summary="positions from a depthwise convolution over neighbors after the first layer",
    paper="Chu et al. 2021",
    url="https://arxiv.org/abs/2102.10882",
    equation=r"x + \mathrm{DWConv}_k(x)",
    cost="time O(T^2 D), memory O(T D) with fused kernels; D (k + 1) parameters",
    cite="chu2023conditional",
    notes="The published models read images; with `grid_size` the block convolves in two dimensions (encoders alone).",
)

make_family(XFCpeConfig, "XFCpe", ALL_HEADS, INFO)
