# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (Yuan et al. 2025): means of blocks, a few chosen blocks, and a window."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFNativeSparseAttentionConfig(XFormerConfig):
    """Native sparse attention (Yuan et al. 2025): means of blocks, a few chosen blocks, and a window."""

    model_type = "xf_native_sparse_attention"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    intermediate_size: int = 2048
    max_position_embeddings: int = 8192
    is_decoder: bool = True
    position: SpecLike = "rotary"
    attention: SpecLike = "native_sparse_attention"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="means of blocks, chosen blocks and a window, gated",
    paper="Yuan et al. 2025",
    url="https://arxiv.org/abs/2502.11089",
    equation=(
        r"o_i = \sum_{c \in \{\mathrm{cmp}, \mathrm{slc}, \mathrm{win}\}} g_i^c\, \mathrm{softmax}\Big("
        r" \frac{q_i K_c^\top}{\sqrt d} \Big) V_c, \qquad g_i = \sigma(W x_i)"
    ),
    cost=(
        "time O(T (m b + w + T / b) D) for m blocks of b tokens and a window of w, memory O(T (m b + T / b)); a cache"
        " as large as dense attention's"
    ),
    notes=(
        "Causal only. In the form of flash-linear-attention: one projection of keys and values for all three branches,"
        " and means of blocks as compression, whose blocks are also those that are chosen. Heads that share keys"
        " choose together. The choice has no gradient."
    ),
    cite="yuan2025native",
)

make_family(XFNativeSparseAttentionConfig, "XFNativeSparseAttention", DECODER_HEADS, INFO)
