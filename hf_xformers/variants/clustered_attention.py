# SPDX-License-Identifier: Apache-2.0
"""Clustered attention (Vyas et al. 2020): queries that are alike share one row of attention."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFClusteredAttentionConfig(XFormerConfig):
    """Clustered attention (Vyas et al. 2020): queries that are alike share one row of attention."""

    model_type = "xf_clustered_attention"

    attention: SpecLike = "clustered_attention"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.3",
    summary="queries in clusters by hashing and k-means, one row of attention for each cluster",
    paper="Vyas et al. 2020",
    url="https://arxiv.org/abs/2007.04825",
    equation=r"o_i = (A^c V)_{g(i)}, \quad A^c = \mathrm{softmax}\!\left(\frac{Q^c K^\top}{\sqrt d}\right), \quad "
    r"Q^c_c = \frac{1}{|\{i : g(i) = c\}|} \sum_{g(i) = c} q_i",
    cost="time O(T C (b L + D)) for C clusters, b bits and L steps of k-means; memory O(T (C + D))",
    cite="vyas2020fast",
    notes=(
        "Hash planes are drawn once and saved, and k-means starts at evenly spaced tokens, so that a text's clusters"
        " are its own; the released code draws new ones in every call. No causal form exists; the decoder of an"
        " encoder-decoder has dense attention."
    ),
)

make_family(XFClusteredAttentionConfig, "XFClusteredAttention", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
