# SPDX-License-Identifier: Apache-2.0
"""BERT (Devlin et al. 2019): a bidirectional encoder pretrained by masked language modeling and sentence pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, SENTENCE_PAIR_HEADS, VariantInfo, make_family


class XFBertConfig(XFormerConfig):
    """BERT (Devlin et al. 2019): a bidirectional encoder pretrained by masked language modeling and sentence
    pairs."""

    model_type = "xf_bert"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }

    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="7",
    summary="dense softmax attention, learned positions, post-LN, GELU",
    paper="Devlin et al. 2019",
    url="https://arxiv.org/abs/1810.04805",
    equation=r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    cite="devlin2019bert",
)

make_family(
    XFBertConfig,
    "XFBert",
    (
        *ENCODER_HEADS,
        *SENTENCE_PAIR_HEADS,
        "ForEntityReplacement",
        "ForTextContrast",
        "ForPhraseContrast",
        "ForCausalLM",
    ),
    INFO,
)
