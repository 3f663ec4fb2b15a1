# SPDX-License-Identifier: Apache-2.0
"""R-Transformer (Wang et al. 2019): a recurrent network over a short window before attention."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFRTransformerConfig(XFormerConfig):
    """R-Transformer (Wang et al. 2019): a recurrent network over a short window before attention."""

    model_type = "xf_r_transformer"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    position: SpecLike = "none"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"
    block: SpecLike = "r_transformer"


INFO = VariantInfo(
    section="5.1",
    summary="each layer runs a recurrent network over every token's window, then attention without positions",
    paper="Wang et al. 2019",
    url="https://arxiv.org/abs/1907.05572",
    equation=r"h_t = \mathrm{RNN}(x_{t-M+1}, \dots, x_t), \qquad y = \mathrm{FFN}(\mathrm{MHA}(h))",
    cost="time O(T M D^2 + T^2 D), M steps one after the other; memory O(T D M)",
    cite="wang2019rtransformer",
)

make_family(XFRTransformerConfig, "XFRTransformer", ALL_HEADS, INFO)
