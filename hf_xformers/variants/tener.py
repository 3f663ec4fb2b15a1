# SPDX-License-Identifier: Apache-2.0
"""TENER (Yan et al. 2019): a Transformer encoder for named entities."""

from __future__ import annotations

from typing import Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


class XFTenerConfig(XFormerConfig):
    """TENER (Yan et al. 2019): a Transformer encoder for named entities.

    Words are tokens and bring their characters: encode them with
    `hf_xformers.data.word_characters.WordCharacterTokenizer`, which `hf-xformers finetune` trains for this family.
    `tag_decoder="softmax"` tags words one by one.
    """

    model_type = "xf_tener"

    hidden_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    intermediate_size: int = 512
    hidden_dropout_prob: float | int = 0.15
    attention_probs_dropout_prob: float | int = 0.15
    tag_decoder: Literal["softmax", "crf"] = "crf"
    embedding: SpecLike = preset({"type": "word_characters"})
    position: SpecLike = "none"  # attention knows distance and direction
    attention: SpecLike = "tener"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="6.4",
    summary="direction-aware unscaled attention, characters of words, and a CRF over tags",
    paper="Yan et al. 2019",
    url="https://arxiv.org/abs/1911.04474",
    equation=(
        r"A_{ts} = Q_t K_s^\top + Q_t R_{t-s}^\top + u K_s^\top + v R_{t-s}^\top, \quad K = X, \quad R_r = [\sin(c_i"
        r" r), \cos(c_i r)], \quad p(y \mid x) \propto \exp \sum_t (e_t[y_t] + A[y_{t-1}, y_t])"
    ),
    cost="time O(T^2 D), scores are made twice; 2 D^2 parameters a layer; O(C^2) for a word's C characters",
    notes=(
        "The tag decoder is a conditional random field over the words, whose best sequences of B-, I- and O tags are"
        " well-formed. Tokens without `character_ids`, such as [CLS], count as words that are not spelt."
    ),
    cite="yan2019tener",
)

make_family(XFTenerConfig, "XFTener", ("Model", "ForMaskedLM", "ForTokenClassification"), INFO)
