# SPDX-License-Identifier: Apache-2.0
"""ERNIE-Doc (Ding et al. 2021): long documents in segments, whose memory is what the same layer gave before."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFErnieDocConfig(XFormerConfig):
    """ERNIE-Doc (Ding et al. 2021): long documents in segments, whose memory is what the same layer gave before.

    `max_position_embeddings` is the length of a segment (tokens). An encoder cuts a longer document itself and reads
    it twice; a causal decoder, and an encoder that is given one segment per call, take a model output's
    `segment_memory` as the next segment's input of the same name. `token_type_ids` are read by the attention.
    `pretraining` has the settings `reordering` of `ForSegmentReordering`.
    """

    model_type = "xf_ernie_doc"

    pretraining: dict[str, Any] = preset({"reordering": {}})
    position: SpecLike = "none"  # in the attention's scores
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    attention: SpecLike = preset(
        {
            "type": "transformer_xl",
            "share_biases": False,
            "distances": "learned",
            "key_types": 3,
        }
    )
    stack: SpecLike = preset({"type": "segment_recurrent", "memory_length": 128, "recurrence": "same_layer"})


INFO = VariantInfo(
    section="6.4",
    summary="segments read what the same layer gave for earlier ones; documents are read twice",
    paper="Ding et al. 2021",
    url="https://arxiv.org/abs/2012.15688",
    equation=(
        r"\tilde h_{\tau+1}^{n} = [\mathrm{SG}(h_{\tau}^{n+1}) \circ h_{\tau+1}^{n}], \qquad "
        r"A_{ij} = \frac{(q_i + u)^\top k_j + (q_i + v)^\top W_R r_{i-j} + (q_i + t)^\top W_T e_j}{\sqrt d}"
    ),
    cost="time O(T (M + T) D) per segment of T tokens, twice in an encoder; memory O(M + T) per segment",
    notes=(
        "An encoder reads a document of more than `max_position_embeddings` tokens in segments, twice: the second time"
        " every segment's memory goes back to the whole document (`retrospective`). In training, segments that are"
        " given one per call (`XFormerTrainer(segment_streams=True)`) need as much memory as one. The objective"
        " `segment_reordering` trains `ForSegmentReordering`. In generation the text is one segment, and the cache"
        " holds its last tokens (M and a segment's) after a memory that is given."
    ),
    cite="ding2021erniedoc",
)

make_family(XFErnieDocConfig, "XFErnieDoc", (*ENCODER_HEADS, "ForSegmentReordering", "ForCausalLM"), INFO)
