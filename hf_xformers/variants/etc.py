# SPDX-License-Identifier: Apache-2.0
"""ETC (Ainslie et al. 2020): a long text next to global tokens that stand for its parts."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFETCConfig(XFormerConfig):
    """ETC (Ainslie et al. 2020): a long text next to global tokens that stand for its parts.

    `pretraining` has the settings `contrastive_prediction` of `ForContrastivePrediction`.
    """

    model_type = "xf_etc"

    pretraining: dict[str, Any] = preset({"contrastive_prediction": {}})
    vocab_size: int = 30522
    type_vocab_size: int = 16
    max_position_embeddings: int = 4096
    layer_norm_eps: float = 1e-12
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = "etc_relative"
    attention: SpecLike = "etc"
    stack: SpecLike = "etc"
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "tanh"})
    head: SpecLike = "transform"
    decoder: dict[str, Any] | None = preset({"attention": "dense", "stack": "plain", "position": "learned_absolute"})


INFO = VariantInfo(
    section="4.1",
    summary="a band for all tokens, and global tokens that stand for parts of the text",
    paper="Ainslie et al. 2020",
    url="https://arxiv.org/abs/2004.08483",
    equation=(
        r"o_i = \sum_{j \in N(i)} \mathrm{softmax}_{N(i)}\!\left(\frac{q_i \cdot k_j + q_i \cdot E_{l_{ij}} +"
        r" \beta_{l_{ij}}}{\sqrt{d}}\right) v_j, \quad N(i) = \{j : |i - j| \le r\} \cup G \ (i \notin G)"
    ),
    cost=(
        "time and memory O(T (r + G) D) for a radius r and G global tokens, one for each tokens_per_global (27) tokens"
    ),
    cite="ainslie2020etc",
    notes=(
        "An encoder. A global token stands for `tokens_per_global` tokens (field of the stack), or for a sentence"
        " where the model input `sentence_ids` [batch, length] says where those end. hard_g2l and hard_l2g of the"
        " position are the hard masks. Both streams share norms and feed-forwards; the released code has a norm after"
        " attention for each. `ForContrastivePrediction` has the objective CPC"
        " (section 2.3; `hf-xformers pretrain --objective cpc_etc`)."
    ),
)

make_family(XFETCConfig, "XFETC", (*ENCODER_HEADS, "ForSeq2SeqLM", "ForContrastivePrediction"), INFO)
