# SPDX-License-Identifier: Apache-2.0
"""HierSumm (Liu and Lapata 2019): summaries of several documents, with attention between paragraphs."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFHiersummConfig(XFormerConfig):
    """HierSumm (Liu and Lapata 2019): summaries of several documents, with attention between paragraphs.

    `stack={"type": "hiersumm", "segment_length": W}` says how many tokens a paragraph has at most. Models take
    `sentence_ids` [B, T], which number the paragraphs; without them, every W tokens are one.
    """

    model_type = "xf_hiersumm"

    vocab_size: int = 32000
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_decoder_layers: int | None = 1
    num_attention_heads: int = 8
    intermediate_size: int = 1024
    max_position_embeddings: int = 2400
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    eos_token_id: int | list[int] | None = 1
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "none"  # the stack has positions of words and of paragraphs
    block: SpecLike = "hiersumm"
    stack: SpecLike = "hiersumm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"
    decoder: dict[str, Any] | None = preset({"stack": "plain", "block": "vanilla", "position": "sinusoidal_absolute"})


INFO = VariantInfo(
    section="6.4",
    summary="layers in paragraphs, then layers between paragraphs' pooled vectors",
    paper="Liu and Lapata 2019",
    url="https://arxiv.org/abs/1905.13164",
    equation=(
        r"h_p = \mathrm{LN}\Big(\sum_i \mathrm{softmax}_i(x_i W_a)\, x_i W_b\Big), \quad x_i \leftarrow x_i + "
        r"\mathrm{Attn}(h_p, h_1 \dots h_P) W_c"
    ),
    cost="time O(T W D + (T/W)^2 D) for paragraphs of W tokens; decoder O(T) memory per target token",
    notes=(
        "The decoder reads the words of all paragraphs, in their order. The input `paragraph_graph` [B, P, P] gives"
        " weights of similar paragraphs to `block.graph_heads` heads. `finetune --task summarization` takes texts with"
        " empty lines between paragraphs, or lists of texts."
    ),
    cite="liu2019hierarchical",
)

make_family(XFHiersummConfig, "XFHiersumm", SEQ2SEQ_HEADS, INFO)
