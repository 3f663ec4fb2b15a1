# SPDX-License-Identifier: Apache-2.0
"""Macaron (Lu et al. 2019): each layer is attention between two half feed-forward steps."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMacaronConfig(XFormerConfig):
    """Macaron (Lu et al. 2019): each layer is attention between two half feed-forward steps."""

    model_type = "xf_macaron"

    block: SpecLike = "macaron"


INFO = VariantInfo(
    section="6.5",
    summary="attention between two half feed-forward steps",
    paper="Lu et al. 2019",
    url="https://arxiv.org/abs/1906.02762",
    equation=(
        r"x \leftarrow x + \tfrac12 \mathrm{FF}_1(x),\quad x \leftarrow x + \mathrm{SA}(x),\quad x \leftarrow x +"
        r" \tfrac12 \mathrm{FF}_2(x)"
    ),
    cost="that of the vanilla Transformer",
    cite="lu2019understanding",
)

make_family(XFMacaronConfig, "XFMacaron", ALL_HEADS, INFO)
