# SPDX-License-Identifier: Apache-2.0
"""CSALR (Chen et al. 2020): attention decomposed through the attention of a few landmarks."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFCSALRConfig(XFormerConfig):
    """CSALR (Chen et al. 2020): attention decomposed through the attention of a few landmarks."""

    model_type = "xf_csalr"

    attention: SpecLike = "csalr"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.4",
    summary="softmax attention decomposed into what tokens take of landmarks and what landmarks read",
    paper="Chen et al. 2020",
    url="https://doi.org/10.24963/ijcai.2020/285",
    equation=r"\mathrm{softmax}\!\left(\tfrac{Q \tilde K^\top}{\sqrt d}\right) "
    r"\left(\mathrm{softmax}\!\left(\tfrac{\tilde Q \tilde K^\top}{\sqrt d}\right) + I\right)^{-1} "
    r"\mathrm{softmax}\!\left(\tfrac{\tilde Q K^\top}{\sqrt d}\right) V",
    cost="time O(T m D + H m^3) for m landmarks, memory O(T m)",
    cite="chen2020csalr",
    notes=(
        "Proposed for feature maps of images; here over tokens, in the form that the survey gives (section 4.4.2)."
        " Rows of the implied attention sum to 1/2. The matrix that is inverted can be near singular, where two"
        " landmarks read each other alone, and outputs of the equation are then many times as large as values; here"
        " it is a damped least-squares solution, which bounds them; by how much depends on the precision of the"
        " numbers. No causal form exists; the decoder of an encoder-decoder has dense attention."
    ),
)

make_family(XFCSALRConfig, "XFCSALR", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
