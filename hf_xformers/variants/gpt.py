# SPDX-License-Identifier: Apache-2.0
"""GPT (Radford et al. 2018): a post-LN causal decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFGPTConfig(XFormerConfig):
    """GPT (Radford et al. 2018): a post-LN causal decoder."""

    model_type = "xf_gpt"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
    }

    vocab_size: int = 40478
    pad_token_id: int | None = None
    is_decoder: bool = True
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "tanh"})


INFO = VariantInfo(
    section="7",
    summary="causal decoder, post-LN, tanh-GELU",
    paper="Radford et al. 2018",
    url="https://openai.com/index/language-unsupervised/",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    cite="radford2018improving",
)

make_family(XFGPTConfig, "XFGPT", (*DECODER_HEADS, "ForBidirectionalLM"), INFO)
