# SPDX-License-Identifier: Apache-2.0
"""Expert prototyping (Yang et al. 2021): experts in groups, and each token goes to the best of every group."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFExpertPrototypingConfig(XFormerConfig):
    """Expert prototyping (Yang et al. 2021): experts in groups, and each token goes to the best of every group."""

    model_type = "xf_expert_prototyping"

    feedforward: SpecLike = "expert_prototyping"


INFO = VariantInfo(
    section="5.3",
    summary="several routers, each of which sends a token to one expert of its own group",
    paper="Yang et al. 2021",
    url="https://arxiv.org/abs/2105.15082",
    equation=(
        r"p^z = \mathrm{softmax}(W^z x), \qquad y = \sum_{z=1}^k p^z_{i_z} \, \mathrm{FFN}^z_{i_z}(x), \qquad i_z = "
        r"\arg\max_i p^z_i"
    ),
    cost=(
        "time of k feed-forwards per token for k groups (of one with capacity `1x`) plus O(T E D) for the routers; "
        "E times the feed-forward parameters"
    ),
    cite="yang2021m6t",
    notes=(
        "Queues are per text and in token order, as in the Switch Transformer here; evaluation is without a capacity."
    ),
)

make_family(XFExpertPrototypingConfig, "XFExpertPrototyping", ALL_HEADS, INFO)
