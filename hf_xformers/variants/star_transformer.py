# SPDX-License-Identifier: Apache-2.0
"""Star-Transformer (Guo et al. 2019): a ring of tokens around a relay."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFStarTransformerConfig(XFormerConfig):
    """Star-Transformer (Guo et al. 2019): a ring of tokens around a relay.

    Projections start as Glorot and Bengio's (`initializer`): the smaller numbers of the other families fade in layers
    that have no residual paths, and little is learned for long.
    """

    model_type = "xf_star_transformer"

    hidden_size: int = 300
    num_hidden_layers: int = 2
    num_attention_heads: int = 6
    add_pooler: bool = True
    attention: SpecLike = "star_transformer"
    residual: SpecLike = "no_residual"
    block: SpecLike = "no_ffn"
    initializer: Initializer = "xavier"
    decoder: dict[str, Any] | None = preset({"attention": "dense", "residual": "post_ln", "block": "vanilla"})


INFO = VariantInfo(
    section="4.1",
    summary="each token reads its two neighbors, its embedding and one relay, which reads all tokens",
    paper="Guo et al. 2019",
    url="https://arxiv.org/abs/1902.09113",
    equation=(
        r"h_i^t = \mathrm{LN}(\mathrm{ReLU}(\mathrm{MHA}(h_i^{t-1}, [h_{i-1}^{t-1}; h_i^{t-1}; h_{i+1}^{t-1}; e_i;"
        r" s^{t-1}]))), \quad s^t = \mathrm{LN}(\mathrm{ReLU}(\mathrm{MHA}(s^{t-1}, [s^{t-1}; H^t])))"
    ),
    cost="time and memory O(T D) besides projections; 8 D^2 parameters per layer, no feed-forward",
    cite="guo2019star",
    notes=(
        "An encoder without residual sums and feed-forwards. A text is classified by the largest number of each"
        " channel and the relay. The decoder of an encoder-decoder is a vanilla one. The released code (fastNLP)"
        " differs, and is what {'border': 'zeros', 'relay_activation': 'leaky_relu', 'relay_norm': False,"
        " 'norm_inputs': True} of the attention and {'activation': 'leaky_relu', 'norm': False} of the residual"
        " compute."
    ),
)

make_family(XFStarTransformerConfig, "XFStarTransformer", (*ENCODER_HEADS, "ForSeq2SeqLM"), INFO)
