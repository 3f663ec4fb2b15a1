# SPDX-License-Identifier: Apache-2.0
"""The free mix: any component in any slot."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..families import FREE_HEADS, VariantInfo, make_family

INFO = VariantInfo(
    summary="freely mixed components",
    paper="Lin et al. 2022",
    url="https://arxiv.org/abs/2106.04554",
    equation=r"x \leftarrow \mathrm{residual}(x, \mathrm{sublayer}(x))",
    cost="that of its components",
    cite="lin2022survey",
)

make_family(XFormerConfig, "XFormer", FREE_HEADS, INFO)
