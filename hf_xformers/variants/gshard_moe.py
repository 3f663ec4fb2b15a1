# SPDX-License-Identifier: Apache-2.0
"""GShard (Lepikhin et al. 2020): each token goes to its best expert and, at random, to its second best."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFGShardMoEConfig(XFormerConfig):
    """GShard (Lepikhin et al. 2020): each token goes to its best expert and, at random, to its second best."""

    model_type = "xf_gshard_moe"

    feedforward: SpecLike = "gshard_moe"


INFO = VariantInfo(
    section="5.3",
    summary="the best and, at random, the second-best of many feed-forward experts, up to a capacity",
    paper="Lepikhin et al. 2020",
    url="https://arxiv.org/abs/2006.16668",
    equation=(
        r"g = \mathrm{softmax}(x W), \qquad y = \frac{g_{e_1} \, \mathrm{FFN}_{e_1}(x) + b \, g_{e_2} \, "
        r"\mathrm{FFN}_{e_2}(x)}{g_{e_1} + g_{e_2}}, \qquad b \sim \mathrm{Bernoulli}\Big(\frac{2 g_{e_2}}{g_{e_1} + "
        r"g_{e_2}}\Big)"
    ),
    cost="time of two feed-forwards per token plus O(T E D) for the router; E times the feed-forward parameters",
    cite="lepikhin2021gshard",
    notes=(
        "A text is a group: its tokens share queues with no other text; `group_size` cuts it into the paper's local "
        "groups, which never reach over a text's end. In an encoder's training an expert takes "
        "the first 2 T / E tokens of a group, first choices before second ones. In a decoder that would let later "
        "tokens decide what an earlier one reads, so decoders are without a capacity unless `decoder_capacity` asks "
        "for the paper's; evaluation is without one everywhere."
    ),
)

make_family(XFGShardMoEConfig, "XFGShardMoE", ALL_HEADS, INFO)
