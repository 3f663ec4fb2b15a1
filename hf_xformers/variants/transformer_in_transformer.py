# SPDX-License-Identifier: Apache-2.0
"""Transformer in Transformer (Han et al. 2021): an encoder of images that reads the pixels inside its patches."""

from __future__ import annotations

from typing import ClassVar

from ..configuration_image import XFormerImageConfig
from ..core.components import SpecLike, preset
from ..families import IMAGE_HEADS, VariantInfo, make_family


class XFTransformerInTransformerConfig(XFormerImageConfig):
    """Transformer in Transformer (Han et al. 2021): an encoder of images that reads the pixels inside its patches.

    The presets are TNT-S. `embedding={"type": "pixel_patch", "inner_width": c, "inner_stride": s}` says how pixels are
    read; `s` divides `patch_size`.
    """

    model_type: ClassVar[str] = "xf_transformer_in_transformer"

    hidden_size: int = 384
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = preset({"type": "dense", "bias": False, "output_bias": True})
    embedding: SpecLike = "pixel_patch"
    block: SpecLike = "transformer_in_transformer"
    residual: SpecLike = "pre_ln"


INFO = VariantInfo(
    section="6.4",
    summary="a Transformer over pixels inside one over patches",
    paper="Han et al. 2021",
    url="https://arxiv.org/abs/2103.00112",
    equation=(
        r"Y_i \leftarrow T_{\mathrm{in}}(Y_i), \quad z_i \leftarrow z_i + \mathrm{LN}(W\,\mathrm{LN}(\mathrm{vec}\,"
        r" Y_i)), \quad z \leftarrow T_{\mathrm{out}}(z)"
    ),
    cost="time O(N^2 D + N m^2 c) for N patches of m pixel vectors of width c",
    notes=(
        "Takes `pixel_values` from transformers' `ViTImageProcessor`. The convolution over pixels sees one patch at a"
        " time and a norm is on either side of W, as in timm's `tnt_s_patch16_224`, whose weights fit."
    ),
    cite="han2021transformer",
)

make_family(XFTransformerInTransformerConfig, "XFTransformerInTransformer", IMAGE_HEADS, INFO)
