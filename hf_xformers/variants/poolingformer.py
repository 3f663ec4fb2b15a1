# SPDX-License-Identifier: Apache-2.0
"""Poolingformer (Zhang et al. 2021): a sliding window, and attention over pooled keys of a wider one."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFPoolingformerConfig(XFormerConfig):
    """Poolingformer (Zhang et al. 2021): a sliding window, and attention over pooled keys of a wider one."""

    model_type = "xf_poolingformer"

    max_position_embeddings: int = 4096
    attention: SpecLike = "poolingformer"


INFO = VariantInfo(
    section="4.3",
    summary="a sliding window, and in some layers a second level of attention over pooled keys of a wider window",
    paper="Zhang et al. 2021",
    url="https://arxiv.org/abs/2105.04371",
    equation=(
        r"y_i = \mathrm{softmax}_{|i - j| \le w_1}\!\left(\frac{q_i K^\top}{\sqrt{d}}\right) V, \quad z_i ="
        r" \mathrm{softmax}_{|i - p \xi| \lesssim w_2}\!\left(\frac{q'_i \,\mathrm{pool}(K')^\top}{\sqrt{d}}\right)"
        r" \mathrm{pool}(V'), \quad o_i = W_o (y_i + z_i)"
    ),
    cost=(
        "time O(T w_1 D), in layers with two levels O(T (w_1 + w_2 / xi) D), memory O(T (w_1 + w_2 / xi)); 3 D^2"
        " parameters more in each of those"
    ),
    cite="zhang2021poolingformer",
    notes=(
        "Windows count tokens on one side. By default a quarter of the layers, in the middle, has two levels"
        " (attention field two_level_layers). Decoders are not in the paper: their second level reads pooled keys"
        " whose tokens are all in the past."
    ),
)

make_family(XFPoolingformerConfig, "XFPoolingformer", ALL_HEADS, INFO)
