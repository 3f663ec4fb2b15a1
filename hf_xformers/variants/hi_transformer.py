# SPDX-License-Identifier: Apache-2.0
"""Hi-Transformer (Wu et al. 2021): sentence and document Transformers in turn, for long texts."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFHiTransformerConfig(XFormerConfig):
    """Hi-Transformer (Wu et al. 2021): sentence and document Transformers in turn, for long texts.

    `stack={"type": "hi_transformer", "segment_length": W}` says how many tokens a sentence has at most. Models take
    `sentence_ids` [B, T]; without them, every W tokens are a sentence.
    """

    model_type = "xf_hi_transformer"

    hidden_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    intermediate_size: int = 1024
    max_position_embeddings: int = 2048
    add_pooler: bool = True
    position: SpecLike = "none"  # the stack has positions of words and of sentences
    block: SpecLike = "hi_transformer"
    stack: SpecLike = "hi_transformer"


INFO = VariantInfo(
    section="6.4",
    summary="sentence and document Transformers in turn; words reach other sentences through document vectors",
    paper="Wu et al. 2021",
    url="https://arxiv.org/abs/2106.01040",
    equation=(
        r"s_i = \mathrm{pool}(h_{i1}, \dots, h_{iW}), \quad (d_1, \dots, d_S) = \mathrm{T}_{\mathrm{doc}}(s_1 + p_1,"
        r" \dots), "
        r"\quad [h_i; \cdot] \leftarrow \mathrm{T}_{\mathrm{sent}}(h_{i1}, \dots, h_{iW}, d_i)"
    ),
    cost="time O(T W D + (T/W)^2 D) for sentences of W tokens",
    notes=(
        "The text's vector, for classification, pools words to sentences and sentences to the text by attention."
        " Sentences come from `sentence_ids`, e.g. `hf_xformers.blocks.nesting.sentence_ids_of(input_ids,"
        " separators)`, or are W tokens long."
    ),
    cite="wu2021hi",
)

make_family(XFHiTransformerConfig, "XFHiTransformer", ENCODER_HEADS, INFO)
