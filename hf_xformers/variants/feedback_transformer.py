# SPDX-License-Identifier: Apache-2.0
"""Feedback Transformer (Fan et al. 2020): every layer reads what all layers made of earlier tokens."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFFeedbackTransformerConfig(XFormerConfig):
    """Feedback Transformer (Fan et al. 2020): every layer reads what all layers made of earlier tokens."""

    model_type = "xf_feedback_transformer"

    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "scaled_residual"
    is_decoder: bool = True
    position: SpecLike = "none"  # keys have learned vectors by distance
    attention: SpecLike = preset({"type": "feedback", "bias": False})
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"
    stack: SpecLike = "feedback"


INFO = VariantInfo(
    section="6.2",
    summary="attention over merged memories of all layers at earlier tokens, computed one token after the other",
    paper="Fan et al. 2020",
    url="https://arxiv.org/abs/2002.09402",
    equation=(
        r"m_t = \sum_{l=0}^{L} \mathrm{softmax}(w)_l \, x_t^l, \qquad "
        r"x_t^l = \mathrm{layer}_l(x_t^{l-1};\; m_{t-W}, \dots, m_{t-1})"
    ),
    cost="time O(T L (W D + D^2)) in T sequential steps; state for decoding O(W D), whatever the depth and the length",
    notes=(
        "Training has no form that is parallel in time: the top layer's output at one token is read by every layer at"
        " the next. A forward pass is a loop over tokens, slower than a Transformer's by a large factor; larger"
        " batches cost little more. A token does not read itself; what lies before the text, or is padding, is an"
        " empty memory (k = v = 0)."
    ),
    cite="fan2020addressing",
)

make_family(XFFeedbackTransformerConfig, "XFFeedbackTransformer", DECODER_HEADS, INFO)
