# SPDX-License-Identifier: Apache-2.0
"""Longformer (Beltagy et al. 2020): a sliding window, and global tokens that see and are seen by all."""

from __future__ import annotations

import copy
from typing import Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLongformerConfig(XFormerConfig):
    """Longformer (Beltagy et al. 2020): a sliding window, and global tokens that see and are seen by all."""

    model_type = "xf_longformer"

    vocab_size: int = 50265
    type_vocab_size: int = 1
    max_position_embeddings: int = 4096
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = 2
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = preset({"type": "learned_absolute", "offset": 2})
    attention: SpecLike = "longformer"
    head: SpecLike = "transform"

    def tower(self, name: Literal["trunk", "decoder"]) -> XFormerConfig:
        """As for every config; an encoder-decoder's decoder reads everything (LED) unless `decoder` says otherwise."""
        if name == "trunk" or "attention" in (self.decoder or {}):
            return super().tower(name)
        view = copy.copy(self)
        view.decoder = {**(self.decoder or {}), "attention": "dense"}
        return XFormerConfig.tower(view, name)


INFO = VariantInfo(
    section="4.1",
    summary="a sliding window for all tokens, and global tokens with projections of their own",
    paper="Beltagy et al. 2020",
    url="https://arxiv.org/abs/2004.05150",
    equation=(
        r"o_i = \sum_{j \in N(i)} \mathrm{softmax}_{N(i)}\!\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right) v_j, \quad "
        r"N(i) = \{j : |i - j| \le W/2\} \cup G \ (i \notin G), \quad N(i) = \{1, \dots, T\} \ (i \in G)"
    ),
    cost="time and memory O(T (W + G) D) for a window of W and G global tokens; 3 D^2 more parameters per layer",
    cite="beltagy2020longformer",
    notes=(
        "Global tokens are the model input `global_attention_mask` [batch, length], 1 = global. Without it, text"
        " classification takes the first token, question answering the tokens before the first `sep_token_id`,"
        " multiple choice those of the part after the separators, all others none. Decoders have the causal window"
        " alone; the encoder-decoder (LED) decodes with dense attention."
    ),
)

make_family(XFLongformerConfig, "XFLongformer", ALL_HEADS, INFO)
