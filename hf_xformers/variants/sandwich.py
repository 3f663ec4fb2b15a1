# SPDX-License-Identifier: Apache-2.0
"""Sandwich Transformer (Press et al. 2020): attention sublayers first, feed-forward sublayers last."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFSandwichConfig(XFormerConfig):
    """Sandwich Transformer (Press et al. 2020): attention sublayers first, feed-forward sublayers last."""

    model_type = "xf_sandwich"

    is_decoder: bool = True
    num_hidden_layers: int = 16
    hidden_size: int = 1024
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    residual: SpecLike = "pre_ln"
    block: SpecLike = "sandwich"


INFO = VariantInfo(
    section="6.5",
    summary="the order of sublayers: s^k (sf)^(n-k) f^k",
    paper="Press et al. 2020",
    url="https://arxiv.org/abs/1911.03864",
    equation=r"\mathsf{s}^{k} (\mathsf{s}\mathsf{f})^{n-k} \mathsf{f}^{k}",
    cost="that of the vanilla Transformer",
    cite="press2020improving",
)

make_family(XFSandwichConfig, "XFSandwich", DECODER_HEADS, INFO)
