# SPDX-License-Identifier: Apache-2.0
"""All-attention (Sukhbaatar et al. 2019): learned keys and values in attention replace the feed-forward."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAllAttentionConfig(XFormerConfig):
    """All-attention (Sukhbaatar et al. 2019): learned keys and values in attention replace the feed-forward."""

    model_type = "xf_all_attention"

    hidden_size: int = 512
    num_hidden_layers: int = 36
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    attention: SpecLike = "all_attention"
    block: SpecLike = "no_ffn"


INFO = VariantInfo(
    section="5.3",
    summary="learned keys and values in each attention layer take the feed-forward's place",
    paper="Sukhbaatar et al. 2019",
    url="https://arxiv.org/abs/1907.01470",
    equation=(
        r"o_i = \sum_j a_{ij} v_j + \sum_n a_{in} M^V_n, \qquad a_i = \mathrm{softmax}\!\left(\frac{q_i [K ; "
        r"M^K]^\top}{\sqrt d}\right)"
    ),
    cost="time O(T (T + N) D) for N slots; with N = `intermediate_size` the parameters of the vanilla layer",
    cite="sukhbaatar2019augmenting",
    notes=(
        "The slots have no position and are visible to every token, also in a text of padding alone. Attention "
        "weights are given for the text only. The paper's models add an adaptive span and relative positions; here "
        "positions enter at the input."
    ),
)

make_family(XFAllAttentionConfig, "XFAllAttention", ALL_HEADS, INFO)
