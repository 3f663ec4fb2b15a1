# SPDX-License-Identifier: Apache-2.0
"""Linformer (Wang et al. 2020): keys and values are projected over positions to a short sequence."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFLinformerConfig(XFormerConfig):
    """Linformer (Wang et al. 2020): keys and values are projected over positions to a short sequence."""

    model_type = "xf_linformer"

    attention: SpecLike = "linformer"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.3",
    summary="learned matrices over positions project keys and values to a short sequence before attention",
    paper="Wang et al. 2020",
    url="https://arxiv.org/abs/2006.04768",
    equation=(
        r"\mathrm{softmax}\!\left(\frac{Q (E K)^\top}{\sqrt d}\right) F V, \qquad E, F \in \mathbb{R}^{k \times n}"
    ),
    cost=(
        "time O(T k D), memory O(T k) for k projected rows, a quarter of max_position_embeddings unless"
        " projected_length is given; 2 k n parameters per layer, fewer with more sharing"
    ),
    cite="wang2020linformer",
    notes=(
        "No causal form exists; the decoder of an encoder-decoder has dense attention. `max_position_embeddings` is"
        " the number of columns of the projections, so a checkpoint is tied to it."
    ),
)

make_family(XFLinformerConfig, "XFLinformer", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
