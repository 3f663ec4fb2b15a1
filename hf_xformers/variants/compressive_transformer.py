# SPDX-License-Identifier: Apache-2.0
"""Compressive Transformer (Rae et al. 2020): what leaves the segment memory is compressed, not forgotten."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFCompressiveTransformerConfig(XFormerConfig):
    """Compressive Transformer (Rae et al. 2020): what leaves the segment memory is compressed, not forgotten.

    `max_position_embeddings` is the length of a segment (tokens), and of the memory and the compressed memory where
    the stack does not say others. A model output's `segment_memory` is the next segment's input of the same name.
    """

    model_type = "xf_compressive_transformer"

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    intermediate_size: int = 3072
    max_position_embeddings: int = 768
    is_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "none"  # in the attention's scores
    attention: SpecLike = preset({"type": "transformer_xl", "bias": False})
    feedforward: SpecLike = "relu"
    stack: SpecLike = "compressive"


INFO = VariantInfo(
    section="6.4",
    summary="segments, with a second, compressed memory of states",
    paper="Rae et al. 2020",
    url="https://arxiv.org/abs/1911.05507",
    equation=(
        r"\tilde h = [c \circ m \circ h], \qquad c \leftarrow [c \circ f_c(\mathrm{SG}(m_{\mathrm{old}}))], \qquad "
        r"\mathcal{L}_{\mathrm{attn}} = \lVert \mathrm{attn}(h, m_{\mathrm{old}}) - \mathrm{attn}(h,"
        r" f_c(m_{\mathrm{old}})) \rVert_2^2"
    ),
    cost=(
        "time O(T (n_c + n_m + T) D) per segment of T tokens, which reach L (n_m + r n_c) tokens back; memory O(n_c +"
        " n_m + T)"
    ),
    notes=(
        "`outputs.segment_memory` of one segment is the input `segment_memory` of the next. States are compressed in"
        " whole groups of `compression_rate`; the compression learns from `aux_losses['reconstruction']` alone, where"
        " gradients are on. In generation the cache is this memory, and each step projects it anew."
    ),
    cite="rae2020compressive",
)

make_family(XFCompressiveTransformerConfig, "XFCompressiveTransformer", DECODER_HEADS, INFO)
