# SPDX-License-Identifier: Apache-2.0
"""Universal Transformer (Dehghani et al. 2019): one layer at every depth, and tokens that halt when they are done."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFUniversalTransformerConfig(XFormerConfig):
    """Universal Transformer (Dehghani et al. 2019): one layer at every depth, and tokens that halt when they are done.

    `num_hidden_layers` is the most steps that a token takes; `stack={"type": "universal"}` without `act` always takes
    all.
    """

    model_type = "xf_universal_transformer"

    hidden_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "none"  # the stack adds position and step before every step
    feedforward: SpecLike = "relu"
    stack: SpecLike = preset({"type": "universal", "act": "accumulated"})


INFO = VariantInfo(
    section="6.3",
    summary="one layer's weights at every depth, with adaptive computation time per token",
    paper="Dehghani et al. 2019",
    url="https://arxiv.org/abs/1807.03819",
    equation=(
        r"H^t = \mathrm{layer}(H^{t-1} + P^t), \qquad p^t = \sigma((H^{t-1} + P^t) w + b), \qquad "
        r"O = \sum_{t<N} p^t H^t + \Big(1 - \sum_{t<N} p^t\Big) H^N"
    ),
    cost="time O(N T^2 D) for N steps, with one layer's parameters; all tokens' halting ends the loop",
    notes=(
        "N is the first step at which a token's halting probabilities sum to more than 1 - epsilon. The output rule of"
        " the paper's appendix, `O <- u H^t + (1 - u) O`, is `act: overwrite`. A halted token keeps its state, which"
        " others read on. With a cache, and while attentions or hidden states are recorded, all steps run."
    ),
    cite="dehghani2019universal",
)

make_family(XFUniversalTransformerConfig, "XFUniversalTransformer", ALL_HEADS, INFO)
