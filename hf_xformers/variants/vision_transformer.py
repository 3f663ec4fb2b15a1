# SPDX-License-Identifier: Apache-2.0
"""Vision Transformer (Dosovitskiy et al. 2021): an encoder that reads an image as a sequence of patches."""

from __future__ import annotations

from typing import ClassVar

from ..configuration_image import XFormerImageConfig
from ..core.components import SpecLike
from ..families import IMAGE_HEADS, VariantInfo, make_family


class XFVisionTransformerConfig(XFormerImageConfig):
    """Vision Transformer (Dosovitskiy et al. 2021): an encoder that reads an image as a sequence of patches.

    `image_size` and `patch_size` are in pixels; `classifier_pooling="mean"` classifies the mean of the patches.
    """

    model_type: ClassVar[str] = "xf_vision_transformer"

    layer_norm_eps: float = 1e-6
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    add_pooler: bool = True
    residual: SpecLike = "pre_ln"


INFO = VariantInfo(
    section="8",
    summary="patches of an image as tokens, with a class token and learned positions",
    paper="Dosovitskiy et al. 2021",
    url="https://arxiv.org/abs/2010.11929",
    equation=r"z_0 = [x_{\mathrm{class}}; x^1 E; \dots; x^N E] + E_{\mathrm{pos}}, \qquad N = H W / P^2",
    cost="time O(N^2 D + N P^2 C D) for N patches of P^2 pixels",
    notes=(
        "Takes `pixel_values` from transformers' `ViTImageProcessor`. `interpolate_pos_encoding=True` reads images of"
        " other sizes. Presets are ViT-B/16; any attention, feed-forward or stack that stands in an encoder can be"
        " mixed in."
    ),
    cite="dosovitskiy2021image",
)

make_family(XFVisionTransformerConfig, "XFVisionTransformer", (*IMAGE_HEADS, "ForMaskedImageModeling"), INFO)
