# SPDX-License-Identifier: Apache-2.0
"""GPT-2 (Radford et al. 2019): a pre-LN causal decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFGPT2Config(XFormerConfig):
    """GPT-2 (Radford et al. 2019): a pre-LN causal decoder."""

    model_type = "xf_gpt2"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {},
        "medium": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "large": {
            "hidden_size": 1280,
            "num_hidden_layers": 36,
            "num_attention_heads": 20,
            "intermediate_size": 5120,
        },
        "xl": {
            "hidden_size": 1600,
            "num_hidden_layers": 48,
            "num_attention_heads": 25,
            "intermediate_size": 6400,
        },
    }

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    initializer: Initializer = "scaled_residual"
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    is_decoder: bool = True
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "tanh"})


INFO = VariantInfo(
    section="7",
    summary="causal decoder, pre-LN with a final norm",
    paper="Radford et al. 2019",
    url="https://openai.com/index/better-language-models/",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    cite="radford2019language",
)

make_family(XFGPT2Config, "XFGPT2", DECODER_HEADS, INFO)
