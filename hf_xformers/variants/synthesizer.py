# SPDX-License-Identifier: Apache-2.0
"""Synthesizer (Tay et al. 2021): attention scores that each token makes alone, without queries and keys."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFSynthesizerConfig(XFormerConfig):
    """Synthesizer (Tay et al. 2021): attention scores that each token makes alone, without queries and keys."""

    model_type = "xf_synthesizer"

    attention: SpecLike = "synthesizer"


INFO = VariantInfo(
    section="4.5",
    summary="scores from one token (dense) or learned per pair of places (random), not from two tokens",
    paper="Tay et al. 2021",
    url="https://arxiv.org/abs/2005.00743",
    equation=(
        r"B_i = \mathrm{ReLU}(x_i W_1 + b_1) W_2 + b_2 \text{ (dense)}, \quad B = R \text{ (random)}, \qquad O ="
        r" \mathrm{softmax}(B) V"
    ),
    cost=(
        "time O(T^2 D), memory O(T); tables for L places hold H L d numbers (dense), H L^2 (random) or 2 H L k"
        " (factorized random)"
    ),
    cite="tay2021synthesizer",
    notes=(
        'The other forms are `attention={"type": "synthesizer", "kind": ...}` with `random`, `fixed_random`,'
        " `factorized_dense`, `factorized_random`, and mixtures such as `random+dot`. Cross-attention stays dense, as"
        " in the paper."
    ),
)

make_family(XFSynthesizerConfig, "XFSynthesizer", ALL_HEADS, INFO)
