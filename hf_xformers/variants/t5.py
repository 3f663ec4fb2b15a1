# SPDX-License-Identifier: Apache-2.0
"""T5 (Raffel et al. 2020): an encoder-decoder with relative position biases, pretrained by span corruption."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFT5Config(XFormerConfig):
    """T5 (Raffel et al. 2020): an encoder-decoder with relative position biases, pretrained by span corruption."""

    model_type = "xf_t5"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {},
        "base": {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
        },
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "3b": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "intermediate_size": 16384,
            "head_dim": 128,
        },
        "11b": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 128,
            "intermediate_size": 65536,
            "head_dim": 128,
        },
    }

    vocab_size: int = 32128
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "t5"
    eos_token_id: int | list[int] | None = 1
    is_encoder_decoder: bool = True
    position: SpecLike = "t5_relative_bias"
    attention: SpecLike = preset({"type": "dense", "bias": False, "scale": 1.0})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False, "scale": 1.0})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = preset({"type": "pre_ln", "final_dropout": True})
    feedforward: SpecLike = preset({"type": "relu", "bias": False})
    head: SpecLike = preset({"type": "linear", "scale": True})


INFO = VariantInfo(
    section="7",
    summary="score biases by relative distance, RMS norm, no biases",
    paper="Raffel et al. 2020",
    url="https://arxiv.org/abs/1910.10683",
    equation=r"\mathrm{softmax}\!\left(Q K^\top + b_{\mathrm{bucket}(j-i)}\right) V",
    cost="time O(T^2 D), memory O(T D): the bias is evaluated by distance",
    cite="raffel2020exploring",
)

make_family(XFT5Config, "XFT5", SEQ2SEQ_HEADS, INFO)
