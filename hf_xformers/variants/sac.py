# SPDX-License-Identifier: Apache-2.0
"""SAC (Li et al. 2020): tokens read the few others that a predictor trained by reinforcement connects them to."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFSACConfig(XFormerConfig):
    """SAC (Li et al. 2020): tokens read the few others that a predictor trained by reinforcement connects them to."""

    model_type = "xf_sac"

    attention: SpecLike = "sac"


INFO = VariantInfo(
    section="4.1",
    summary="each token reads a few others, chosen by an LSTM that learns from the task's loss",
    paper="Li et al. 2020",
    url="https://arxiv.org/abs/2003.09833",
    equation=(
        r"o_i = \sum_{j \in N(i)} \mathrm{softmax}_{N(i)}\!\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right) v_j, \quad"
        r" N(i) = \{i, a_1, \dots, a_n\}, \quad a_t \sim \mathrm{softmax}_j(f(h_t, x_j)), \quad h_{t+1} ="
        r" \mathrm{LSTM}(x_{a_t}, h_t)"
    ),
    cost=(
        "attention: time O(T n D) with n = 10 edges per token; the predictor: time O(T^2 n P) with width P = 64;"
        " memory O(T D)"
    ),
    cite="li2020sac",
    notes=(
        "Every token is the source of its own edges, the form of the paper that has a causal one; edges as pairs that"
        " one LSTM draws for the whole text, step by step, are not part of it. Edges are sampled in training, where"
        " the predictor learns by the policy gradient with a running mean of the loss as baseline, and the likeliest"
        " ones otherwise. `candidate_window` makes the predictor linear in T. An encoder-decoder has dense"
        " cross-attention."
    ),
)

make_family(XFSACConfig, "XFSAC", ALL_HEADS, INFO)
