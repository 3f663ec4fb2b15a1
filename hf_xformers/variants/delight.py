# SPDX-License-Identifier: Apache-2.0
"""DeLighT (Mehta et al. 2021): deep and light transformations of tokens before attention of half the width."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDelightConfig(XFormerConfig):
    """DeLighT (Mehta et al. 2021): deep and light transformations of tokens before attention of half the width.

    Deeper layers have deeper and wider transformations, from 4 to 8 group linear layers; the released recipes have as
    many layers as the last of these.
    """

    model_type = "xf_delight"

    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 1
    intermediate_size: int = 128
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    feedforward: SpecLike = "swish"
    block: SpecLike = "delight"


INFO = VariantInfo(
    section="6.1",
    summary="group linear transformations of each token, single-head attention, narrow FFN",
    paper="Mehta et al. 2021",
    url="https://arxiv.org/abs/2008.00623",
    equation=(
        r"x \leftarrow \mathrm{LN}(x + \mathrm{SHA}(\mathrm{DExTra}(x))), \qquad h_l = \mathrm{GLT}_l([h_0 ;"
        r" h_{l-1}])"
    ),
    cost="attention O(T^2 D / 2); parameters 1.25 D^2 of attention and D^2 / 2 of the FFN, next to DExTra's",
    notes=(
        "Layer b of B has 4 + 4 b / (B - 1) group linear layers, and its widest point grows alike. Channels are"
        " exchanged between groups as in the paper; the released recipes leave that out (`shuffle: false`)."
    ),
    cite="mehta2021delight",
)

make_family(XFDelightConfig, "XFDelight", ALL_HEADS, INFO)
