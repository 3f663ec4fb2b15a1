# SPDX-License-Identifier: Apache-2.0
"""RoBERTa (Liu et al. 2019): BERT's architecture trained longer, with dynamic masks and without sentence pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFRobertaConfig(XFormerConfig):
    """RoBERTa (Liu et al. 2019): BERT's architecture trained longer, with dynamic masks and without sentence pairs."""

    model_type = "xf_roberta"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }

    vocab_size: int = 50265
    type_vocab_size: int = 1
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = preset({"type": "learned_absolute", "offset": 2})
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="7",
    summary="BERT without sentence pairs, trained on dynamic masks",
    paper="Liu et al. 2019",
    url="https://arxiv.org/abs/1907.11692",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    cite="liu2019roberta",
)

make_family(XFRobertaConfig, "XFRoberta", (*ENCODER_HEADS, "ForCausalLM"), INFO)
