# SPDX-License-Identifier: Apache-2.0
"""Improved clustered attention (Vyas et al. 2020): shared rows of attention, exact for the largest keys."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFImprovedClusteredAttentionConfig(XFormerConfig):
    """Improved clustered attention (Vyas et al. 2020): shared rows of attention, exact for the largest keys."""

    model_type = "xf_improved_clustered_attention"

    attention: SpecLike = "improved_clustered_attention"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.3",
    summary="clustered attention, exact on a cluster's top keys",
    paper="Vyas et al. 2020",
    url="https://arxiv.org/abs/2007.04825",
    equation=r"A_{ij} = \hat m_c\,\mathrm{softmax}_{j \in I_c}\!\left(\frac{q_i k_j}{\sqrt d}\right) \ (j \in I_c), "
    r"\quad A_{ij} = A^c_{cj} \ (j \notin I_c), \quad \hat m_c = \sum_{j \in I_c} A^c_{cj}, \quad c = g(i)",
    cost=(
        "time O(T C (b L + D)) for C clusters, b bits and L steps of k-means, and O(T k D) for k keys; memory"
        " O(T (C + D))"
    ),
    cite="vyas2020fast",
    notes=(
        "Hash planes are drawn once and saved, and k-means starts at evenly spaced tokens, so that a text's clusters"
        " are its own; the released code draws new ones in every call. No causal form exists; the decoder of an"
        " encoder-decoder has dense attention."
    ),
)

make_family(XFImprovedClusteredAttentionConfig, "XFImprovedClusteredAttention", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
