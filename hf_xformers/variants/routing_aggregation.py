# SPDX-License-Identifier: Apache-2.0
"""Routing-by-agreement aggregation (Li et al. 2019): heads vote for the parts of a layer's output."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFRoutingAggregationConfig(XFormerConfig):
    """Routing-by-agreement aggregation (Li et al. 2019): heads vote for the parts of a layer's output.

    The lower half of the layers has it; it takes the place of the output projection. `routing="em"` is the paper's
    second form.
    """

    model_type = "xf_routing_aggregation"

    attention: SpecLike = preset({"type": "dense", "aggregation": "routing_aggregation"})
    cross_attention: SpecLike = preset({"type": "dense", "aggregation": "routing_aggregation"})


INFO = VariantInfo(
    section="4.6",
    summary="routing by agreement joins the heads in place of concatenation and a linear map",
    paper="Li et al. 2019",
    url="https://arxiv.org/abs/1904.03100",
    equation=(
        r"u_h = f_h([O_1 \cdots O_H]), \quad V_{hn} = u_h W_{hn}, \quad"
        r" c_h = \mathrm{softmax}_n(b_h), \quad \Omega_n = \frac{\sum_h c_{hn} V_{hn}}{\sum_h c_{hn}}, \quad"
        r" b_{hn} \leftarrow b_{hn} + \Omega_n \cdot V_{hn}"
    ),
    cost="time O(T^2 D + T H D) and O(T D^2) for votes, memory O(T D): votes are made for some tokens at a time",
    cite="li2019information",
)

make_family(XFRoutingAggregationConfig, "XFRoutingAggregation", ALL_HEADS, INFO)
