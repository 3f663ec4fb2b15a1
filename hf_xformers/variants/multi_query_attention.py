# SPDX-License-Identifier: Apache-2.0
"""Multi-query attention (Shazeer 2019): one head of keys and values for all heads of queries."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMultiQueryAttentionConfig(XFormerConfig):
    """Multi-query attention (Shazeer 2019): one head of keys and values for all heads of queries.

    The feed-forward is wider by what the projections of keys and values save, as in section 3.1 of the paper.
    `num_key_value_heads` between 1 and `num_attention_heads` gives grouped-query attention.
    """

    model_type = "xf_multi_query_attention"

    num_key_value_heads: int | None = 1
    intermediate_size: int = 3776


INFO = VariantInfo(
    section="4.6",
    summary="all heads read the same keys and values, so that a cache holds one head of them",
    paper="Shazeer 2019",
    url="https://arxiv.org/abs/1911.02150",
    equation=(
        r"O_h = \mathrm{softmax}\Big( \frac{X W^q_h (X W^k)^\top}{\sqrt d} \Big) X W^v, \qquad"
        r" O = [O_1 \cdots O_H] W^o"
    ),
    cost="time O(T^2 D), memory O(T D); a cache of 2 d numbers per token and layer with head width d, H times fewer",
    cite="shazeer2019fast",
)

make_family(XFMultiQueryAttentionConfig, "XFMultiQueryAttention", ALL_HEADS, INFO)
