# SPDX-License-Identifier: Apache-2.0
"""Cross-layer attention (Brandon et al. 2024): neighboring layers share keys and values."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFCrossLayerAttentionConfig(XFormerConfig):
    """Cross-layer attention (Brandon et al. 2024): neighboring layers share keys and values."""

    model_type = "xf_cross_layer_attention"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    num_key_value_heads: int | None = 1
    intermediate_size: int = 2048
    position: SpecLike = "rotary"
    attention: SpecLike = preset({"type": "cross_layer_attention", "bias": False})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="neighboring layers read the keys and values of the first of them",
    paper="Brandon et al. 2024",
    url="https://arxiv.org/abs/2405.12981",
    equation=(
        r"o^l = \mathrm{softmax}\!\left(\frac{(W_q^l x^l) (W_k^f x^f)^\top}{\sqrt d}\right) W_v^f x^f, \qquad f ="
        r" n \lfloor l / n \rfloor"
    ),
    cost=(
        "time O(T^2 D); a cache of 2 K d numbers per token in one of n layers, K key heads of width d, and no key and"
        " value projections in the others"
    ),
    cite="brandon2024reducing",
    notes=(
        "Groups have n = `attention.sharing_factor` layers, and all heads one key head, as in the paper's best models"
        " (`num_key_value_heads`). With `sharing_factor=None` and `first_layer` at half the depth, all layers of the"
        " upper half share one set; with windows or a recurrence in the layers below, by `per_layer_config`, that is"
        " the decoder-decoder of YOCO (Sun et al. 2024). Layers that make no keys run on a prompt's last token alone."
    ),
)

make_family(XFCrossLayerAttentionConfig, "XFCrossLayerAttention", ALL_HEADS, INFO)
