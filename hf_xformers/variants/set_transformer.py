# SPDX-License-Identifier: Apache-2.0
"""Set Transformer (Lee et al. 2019): attention through inducing points, and pooling by attention."""

from __future__ import annotations

from typing import Any, Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFSetTransformerConfig(XFormerConfig):
    """Set Transformer (Lee et al. 2019): attention through inducing points, and pooling by attention."""

    model_type = "xf_set_transformer"

    classifier_pooling: Literal["auto", "first", "mean", "last", "late_mean", "attention"] = "attention"
    attention: SpecLike = "set_transformer"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.3",
    summary="tokens read a few learned inducing points that have read all tokens; classifiers pool by attention",
    paper="Lee et al. 2019",
    url="https://arxiv.org/abs/1810.00825",
    equation=r"\mathrm{ISAB}_m(X) = \mathrm{MAB}(X, \mathrm{MAB}(I, X)), \quad "
    r"\mathrm{MAB}(X, Y) = \mathrm{LN}(H + \mathrm{rFF}(H)), \quad "
    r"H = \mathrm{LN}(X + \mathrm{Multihead}(X, Y, Y))",
    cost="time O(T m D) for m inducing points, memory O(T (D + H m)); 5 D^2 + m D parameters more in a layer",
    cite="lee2019set",
    notes=(
        "For sets rather than texts set `position='none'`: outputs then follow any order of the tokens, and a"
        " classifier, which pools by attention with one seed (PMA), does not know it. No causal form exists; the"
        " decoder of an encoder-decoder has dense attention."
    ),
)

make_family(XFSetTransformerConfig, "XFSetTransformer", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
