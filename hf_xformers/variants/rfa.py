# SPDX-License-Identifier: Apache-2.0
"""Random feature attention (Peng et al. 2021): random Fourier features of queries and keys of length one."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFRfaConfig(XFormerConfig):
    """Random feature attention (Peng et al. 2021): random Fourier features of queries and keys of length one."""

    model_type = "xf_rfa"

    attention_probs_dropout_prob: float | int = 0.0
    attention: SpecLike = "rfa"
    cross_attention: SpecLike = "rfa"


INFO = VariantInfo(
    section="4.2",
    summary="softmax attention of unit vectors, estimated by random Fourier features whose scale is learned",
    paper="Peng et al. 2021",
    url="https://arxiv.org/abs/2103.02143",
    equation=r"o_i = \frac{\phi(\hat q_i) \sum_j \phi(\hat k_j)^\top v_j}{\phi(\hat q_i) \sum_j \phi(\hat k_j)^\top},"
    r" \qquad \phi(x) = \frac{1}{\sqrt m} \left( \cos w_1 x, \dots, \cos w_m x, \sin w_1 x, \dots, \sin w_m x"
    r" \right), \qquad w_r = \frac{\sigma \circ \tilde w_r}{\tau}, \qquad \hat x = \frac{x}{|x|}",
    cost=(
        "time O(T m D) for m random rows, memory O(T D); generation keeps 2 H m (d + 1) numbers per layer at any"
        " length"
    ),
    cite="peng2021random",
    notes=(
        "`--attention.gate true` is RFA-Gate, for decoders: each head forgets earlier tokens by a gate that it"
        " computes from the present one. Every training pass draws new random rows (`redraw_interval`), evaluation"
        " keeps the last ones. There are no attention probabilities, so `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFRfaConfig, "XFRfa", ALL_HEADS, INFO)
