# SPDX-License-Identifier: Apache-2.0
"""Sparsely-gated mixture of experts (Shazeer et al. 2017): the best k of many experts by noisy gates."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFSparselyGatedMoEConfig(XFormerConfig):
    """Sparsely-gated mixture of experts (Shazeer et al. 2017): the best k of many experts by noisy gates."""

    model_type = "xf_sparsely_gated_moe"

    feedforward: SpecLike = "sparsely_gated_moe"


INFO = VariantInfo(
    section="5.3",
    summary="noisy gates choose k of many feed-forward experts, with losses on importance and load",
    paper="Shazeer et al. 2017",
    url="https://arxiv.org/abs/1701.06538",
    equation=(
        r"H = x W_g + \epsilon \odot \mathrm{softplus}(x W_n), \quad \epsilon \sim \mathcal N(0, 1), \qquad y = "
        r"\sum_{e \in \mathrm{top}_k(H)} \mathrm{softmax}_{\mathrm{top}_k}(H)_e \, \mathrm{FFN}_e(x)"
    ),
    cost="time of k feed-forwards per token plus O(T E D) for the router; E times the feed-forward parameters",
    cite="shazeer2017outrageously",
    notes=(
        "The paper's host is a recurrent network; here every second feed-forward is a mixture. No expert has a "
        "capacity, so a token's output depends on itself alone; the two losses are taken over the real tokens of "
        "the batch."
    ),
)

make_family(XFSparselyGatedMoEConfig, "XFSparselyGatedMoE", ALL_HEADS, INFO)
