# SPDX-License-Identifier: Apache-2.0
"""SpanBERT (Joshi et al. 2020): BERT's encoder, trained on spans that their two neighbors have to tell."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFSpanBertConfig(XFormerConfig):
    """SpanBERT (Joshi et al. 2020): BERT's encoder, trained on spans that their two neighbors have to tell.

    `pretraining` has the settings `span_boundary` of `ForSpanBoundary`.
    """

    model_type = "xf_span_bert"

    pretraining: dict[str, Any] = preset({"span_boundary": {}})
    vocab_size: int = 28996
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="7",
    summary="BERT trained on masked spans, which the tokens around them predict too",
    paper="Joshi et al. 2020",
    url="https://arxiv.org/abs/1907.10529",
    equation=r"y_i = f(x_{s-1}, x_{e+1}, p_{i-s+1}), \qquad L = L_{\mathrm{MLM}} + L_{\mathrm{SBO}}",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    notes=(
        "The encoder is BERT's, with the names of `xf_bert`, to which released models convert. Pretraining"
        " (`--objective span_bert`) trains `ForSpanBoundary`, whose `boundary_head` BERT has not; there is no sentence"
        " pair."
    ),
    cite="joshi2020spanbert",
)

make_family(XFSpanBertConfig, "XFSpanBert", (*ENCODER_HEADS, "ForSpanBoundary"), INFO)
