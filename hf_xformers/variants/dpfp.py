# SPDX-License-Identifier: Apache-2.0
"""Linear attention with DPFP (Schlag, Irie, Schmidhuber 2021): deterministic features without parameters."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDpfpConfig(XFormerConfig):
    """Linear attention with DPFP (Schlag, Irie, Schmidhuber 2021): deterministic features without parameters."""

    model_type = "xf_dpfp"

    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "dpfp"
    cross_attention: SpecLike = "dpfp"


INFO = VariantInfo(
    section="4.2",
    summary="linear attention with deterministic sparse features: products of neighboring channels",
    paper="Schlag et al. 2021",
    url="https://arxiv.org/abs/2102.11174",
    equation=r"o_i = \frac{\phi(q_i) \sum_j \phi(k_j)^\top v_j}{\phi(q_i) \sum_j \phi(k_j)^\top}, \qquad "
    r"\phi_{i + 2d(j-1)}(x) = \frac{r_i r_{i+j}}{\sum_{s,t} r_s r_{s+t}}, \qquad "
    r"r = \max\left( \binom{x}{-x}, 0 \right), \qquad i \le 2d, \; j \le \nu",
    cost=(
        "time O(T F D) for F = 2 nu d features of heads of width d, memory O(T D); generation keeps H F (d + 1)"
        " numbers per layer at any length"
    ),
    cite="schlag2021linear",
    notes=(
        "In a decoder `--attention.update_rule delta` corrects the state instead of adding to it: the attention of"
        " `xf_delta_net`. There are no attention probabilities, so `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFDpfpConfig, "XFDpfp", ALL_HEADS, INFO)
