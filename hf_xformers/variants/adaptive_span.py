# SPDX-License-Identifier: Apache-2.0
"""Adaptive attention span (Sukhbaatar et al. 2019): every head learns how far back it reads."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAdaptiveSpanConfig(XFormerConfig):
    """Adaptive attention span (Sukhbaatar et al. 2019): every head learns how far back it reads."""

    model_type = "xf_adaptive_span"

    hidden_size: int = 512
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 8192
    hidden_dropout_prob: float | int = 0.3
    attention_probs_dropout_prob: float | int = 0.3
    attention: SpecLike = preset({"type": "adaptive_span", "bias": False})
    position: SpecLike = "none"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="4.6",
    summary="each head has a learned span beyond which nothing is computed; a penalty keeps spans short",
    paper="Sukhbaatar et al. 2019",
    url="https://aclanthology.org/P19-1032/",
    equation=(
        r"A_{ij} = \frac{m(i-j) \, e^{s_{ij}}}{\sum_r m(i-r) \, e^{s_{ir}}}, \quad m(x) = \min\Big(1, \max\Big(0,"
        r" \frac{R + z - x}{R}\Big)\Big)"
    ),
    cost="time and memory O(T S D), where S is the longest learned span of a layer and its ramp",
    cite="sukhbaatar2019adaptive",
    notes=(
        "The paper has causal models only; an encoder reads both sides here. It trains on blocks of 512 tokens that"
        " read the states of earlier ones: stack={'type': 'segment_recurrent', 'memory_length': 8192}. Weight decay"
        " would shorten spans, too, so XFormerTrainer leaves `span` out of it."
    ),
)

make_family(XFAdaptiveSpanConfig, "XFAdaptiveSpan", ALL_HEADS, INFO)
