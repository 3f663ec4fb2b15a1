# SPDX-License-Identifier: Apache-2.0
"""Nystromformer (Xiong et al. 2021): softmax attention approximated through a few landmarks."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFNystromformerConfig(XFormerConfig):
    """Nystromformer (Xiong et al. 2021): softmax attention approximated through a few landmarks."""

    model_type = "xf_nystromformer"

    attention: SpecLike = "nystromformer"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.4",
    summary="softmax attention approximated through landmarks (Nystrom), and a convolution over values",
    paper="Xiong et al. 2021",
    url="https://arxiv.org/abs/2102.03902",
    equation=r"\mathrm{softmax}\!\left(\tfrac{Q \tilde K^\top}{\sqrt d}\right) "
    r"\mathrm{softmax}\!\left(\tfrac{\tilde Q \tilde K^\top}{\sqrt d}\right)^{+} "
    r"\mathrm{softmax}\!\left(\tfrac{\tilde Q K^\top}{\sqrt d}\right) V + \mathrm{DWConv}(V)",
    cost="time O(T m D + H m^3) for m landmarks, memory O(T m)",
    cite="xiong2021nystromformer",
    notes=(
        "No causal form exists; the decoder of an encoder-decoder has dense attention. Texts of any length and padding"
        " are segmented over their real tokens; transformers' class needs a fixed length and averages padding in."
    ),
)

make_family(XFNystromformerConfig, "XFNystromformer", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
