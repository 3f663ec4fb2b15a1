# SPDX-License-Identifier: Apache-2.0
"""ReZero (Bachlechner et al. 2020): residual branches gated by a scalar that starts at zero, without normalization."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFReZeroConfig(XFormerConfig):
    """ReZero (Bachlechner et al. 2020): residual branches gated by a scalar that starts at zero, without
    normalization."""

    model_type = "xf_rezero"

    initializer: Initializer = "xavier"
    # Nothing normalizes what comes in, so it has to start at the size of what layers add.
    embedding: SpecLike = preset({"type": "token", "scale": True})
    residual: SpecLike = "rezero"


INFO = VariantInfo(
    section="5.2",
    summary="a learned scalar gate that starts at zero replaces every norm",
    paper="Bachlechner et al. 2020",
    url="https://arxiv.org/abs/2003.04887",
    equation=r"x \leftarrow x + \alpha_l \, f(x), \qquad \alpha_l = 0 \text{ at the start}",
    cost="that of the vanilla Transformer, without its norms",
    cite="bachlechner2021rezero",
)

make_family(XFReZeroConfig, "XFReZero", ALL_HEADS, INFO)
