# SPDX-License-Identifier: Apache-2.0
"""Transformer-XL (Dai et al. 2019): segments that read the states of earlier segments, with relative positions."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFTransformerXLConfig(XFormerConfig):
    """Transformer-XL (Dai et al. 2019): segments that read the states of earlier segments, with relative positions.

    `max_position_embeddings` is the length of a segment (tokens), and of the memory where the stack does not say
    another. A model output's `segment_memory` is the next segment's input of the same name. The sizes are those of the
    12-layer model for enwik8.
    """

    model_type = "xf_transformer_xl"

    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 512
    is_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "none"  # in the attention's scores
    attention: SpecLike = preset({"type": "transformer_xl", "bias": False})
    feedforward: SpecLike = "relu"
    stack: SpecLike = "segment_recurrent"


INFO = VariantInfo(
    section="6.4",
    summary="every layer also reads its input of earlier segments, with relative positions in the scores",
    paper="Dai et al. 2019",
    url="https://arxiv.org/abs/1901.02860",
    equation=(
        r"\tilde h_{\tau}^{n-1} = [\mathrm{SG}(m_{\tau}^{n-1}) \circ h_{\tau}^{n-1}], \qquad "
        r"A_{ij} = \frac{(q_i + u)^\top k_j + (q_i + v)^\top W_R R_{i-j}}{\sqrt d}"
    ),
    cost="time O(T (M + T) D) per segment of T tokens with a memory of M, so linear in the text; memory O(M + T)",
    notes=(
        "`outputs.segment_memory` of one segment is the input `segment_memory` of the next, row by row; it has the"
        " methods `reset(rows)` (where a new text begins), `reorder(index)` and `detach()`."
        " `XFormerTrainer(segment_streams=True)` lays the corpus in contiguous streams and carries it. In generation"
        " the cache holds the last M tokens, after a memory that is given. The paper's adaptive"
        " softmax and embedding are the components `adaptive` of their slots."
    ),
    cite="dai2019transformerxl",
)

make_family(XFTransformerXLConfig, "XFTransformerXL", DECODER_HEADS, INFO)
