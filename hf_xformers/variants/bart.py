# SPDX-License-Identifier: Apache-2.0
"""BART (Lewis et al. 2020): an encoder-decoder pretrained by denoising."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFBartConfig(XFormerConfig):
    """BART (Lewis et al. 2020): an encoder-decoder pretrained by denoising."""

    model_type = "xf_bart"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }

    vocab_size: int = 50265
    num_hidden_layers: int = 6
    max_position_embeddings: int = 1024
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = preset({"type": "learned_absolute", "offset": 2})
    head: SpecLike = preset({"type": "linear", "bias": True})


INFO = VariantInfo(
    section="7",
    summary="encoder-decoder, learned positions and a norm on each side's embedding",
    paper="Lewis et al. 2020",
    url="https://arxiv.org/abs/1910.13461",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    cite="lewis2020bart",
)

make_family(XFBartConfig, "XFBart", (*SEQ2SEQ_HEADS, "ForCausalLM"), INFO)
