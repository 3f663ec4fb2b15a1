# SPDX-License-Identifier: Apache-2.0
"""HIBERT (Zhang et al. 2019): a document encoder over sentence vectors, pretrained by writing masked sentences."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFHibertConfig(XFormerConfig):
    """HIBERT (Zhang et al. 2019): a document encoder over sentence vectors, pretrained by writing masked sentences.

    `stack={"type": "hibert", "segment_length": W}` says how many tokens a sentence has at most. Models take
    `sentence_ids` [B, T]; without them, every W tokens are a sentence. Labels of sentences stand at their last tokens.
    """

    model_type = "xf_hibert"

    vocab_size: int = 30522
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_decoder_layers: int | None = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 2048
    add_pooler: bool = True
    position: SpecLike = "none"  # the stack has positions of words and of sentences
    stack: SpecLike = "hibert"
    cross_attention: SpecLike = "memory_vector"
    decoder: dict[str, Any] | None = preset({"stack": "plain", "position": "sinusoidal_absolute"})


INFO = VariantInfo(
    section="6.4",
    summary="a document encoder over sentence vectors, pretrained by writing masked sentences",
    paper="Zhang, Wei and Zhou 2019",
    url="https://arxiv.org/abs/1905.06566",
    equation=(
        r"h_{i1}, \dots, h_{in} = \mathrm{T}_{\mathrm{sent}}(w_{i1}, \dots, w_{in}), \quad (d_1, \dots, d_S) ="
        r" \mathrm{T}_{\mathrm{doc}}(h_{1n} + q_1, \dots, h_{Sn} + q_S), \quad p(w_k) = \prod_j p(w_{kj} \mid"
        r" w_{k,<j}, d_k)"
    ),
    cost="time O(T W D + (T/W)^2 D) for sentences of W tokens",
    notes=(
        "Pretraining (`--objective sentence_masking`) masks sentences, and a decoder, in which adding d_k stands in"
        " for cross-attention, writes each of them. `finetune --task extractive-summarization` labels sentences at"
        " their last tokens, whose states are d_1 .. d_S; states of other words, which the paper does not read, have"
        " d_i added. Words see their own sentence, and all others through d_i."
    ),
    cite="zhang2019hibert",
)

make_family(XFHibertConfig, "XFHibert", (*ENCODER_HEADS, "ForMaskedSentences"), INFO)
