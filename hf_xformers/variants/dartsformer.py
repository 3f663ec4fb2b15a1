# SPDX-License-Identifier: Apache-2.0
"""DARTSformer (Zhao et al. 2021): parts of the channels change in turn, by operations that a search has chosen."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDartsformerConfig(XFormerConfig):
    """DARTSformer (Zhao et al. 2021): parts of the channels change in turn, by operations that a search has chosen.

    The operations of the preset are attention and feed-forward, besides which a decoder reads its memory; `hf-xformers
    search` finds others.
    """

    model_type = "xf_dartsformer"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {  # widths that two parts share as well as three, in whole heads
        "tiny": {"hidden_size": 144, "intermediate_size": 576},
        "small": {"hidden_size": 528, "intermediate_size": 2112},
        "base": {"hidden_size": 792, "intermediate_size": 3168},
        "large": {"hidden_size": 1056, "intermediate_size": 4224},
    }

    hidden_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 3072
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    # Operations normalize what they give, not the stream that it is added to.
    residual: SpecLike = preset({"type": "post_ln", "final_norm": True})
    feedforward: SpecLike = "relu"
    block: SpecLike = "dartsformer"


INFO = VariantInfo(
    section="6.5",
    summary="parts of the channels change in turn, by searched operations",
    paper="Zhao et al. 2021",
    url="https://arxiv.org/abs/2105.14669",
    equation=(
        r"Y_k = X_k + G_k(\mathrm{pool}(X_{i>k}, Y_{i<k})), \qquad G_k(h) = \sum_o \mathrm{softmax}(\alpha_k)_o\,"
        r" \mathrm{LN}(h + o(h))"
    ),
    cost="that of the chosen operations on D / n channels: O(T^2 D / 2) with one attention of two parts",
    notes=(
        "In a search all operations of a part are weighed by the softmax of alpha; a derived cell has the heaviest one"
        " alone. The paper shows its own cells as a figure; the preset is plain attention and feed-forward."
    ),
    cite="zhao2021memory",
)

make_family(XFDartsformerConfig, "XFDartsformer", ALL_HEADS, INFO)
