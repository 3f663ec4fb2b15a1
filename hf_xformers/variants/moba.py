# SPDX-License-Identifier: Apache-2.0
"""MoBA (Lu et al. 2025): each token reads its own block and the few earlier ones that it likes best."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMobaConfig(XFormerConfig):
    """MoBA (Lu et al. 2025): each token reads its own block and the few earlier ones that it likes best."""

    model_type = "xf_moba"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    intermediate_size: int = 2048
    max_position_embeddings: int = 8192
    position: SpecLike = "rotary"
    attention: SpecLike = preset({"type": "moba", "bias": False})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="a token reads its own block and those it likes best",
    paper="Lu et al. 2025",
    url="https://arxiv.org/abs/2502.13189",
    equation=(
        r"o_i = \mathrm{softmax}\Big( \frac{q_i K_{I_i}^\top}{\sqrt d} \Big) V_{I_i}, \qquad"
        r" I_i = B_{\lfloor i/b \rfloor} \cup \bigcup_{c \in \mathrm{top}_{m-1}(q_i \bar k_c)} B_c, \qquad"
        r" \bar k_c = \tfrac{1}{b} \sum_{j \in B_c} k_j"
    ),
    cost="time O(T (m b + T / b) D) for m blocks of b tokens, memory O(T m b); a cache as large as dense attention's",
    notes=(
        "It has the parameters of dense attention, so that any trained model runs with it. The choice has no gradient."
        " In an encoder all other blocks can be chosen."
    ),
    cite="lu2025moba",
)

make_family(XFMobaConfig, "XFMoba", ALL_HEADS, INFO)
