# SPDX-License-Identifier: Apache-2.0
"""PowerNorm (Shen et al. 2020): division by a running quadratic mean over tokens, not by each token's own."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFPowerNormConfig(XFormerConfig):
    """PowerNorm (Shen et al. 2020): division by a running quadratic mean over tokens, not by each token's own."""

    model_type = "xf_power_norm"

    normalization: SpecLike = "power_norm"
    feedforward: SpecLike = "relu"
    decoder: dict[str, Any] | None = preset({"normalization": "layer_norm"})


INFO = VariantInfo(
    section="5.2",
    summary="statistics over the batch's tokens, running in both passes, in place of each token's own",
    paper="Shen et al. 2020",
    url="https://arxiv.org/abs/2003.07845",
    equation=(
        r"\hat x_t = \frac{x_t}{\sqrt{\frac1D \sum_c x_{tc}^2}}, \qquad y_t = \gamma \frac{\hat x_t}{\psi} + \beta,"
        r" \qquad "
        r"\psi^2 \leftarrow \alpha \psi^2 + (1 - \alpha) \frac1N \sum_n \hat x_n^2, \qquad "
        r"\partial \hat x = \frac{\gamma \, \partial y - \nu \, \hat x / \psi}{\psi}"
    ),
    cost="that of the vanilla Transformer; 2 D running numbers per norm",
    cite="shen2020powernorm",
    notes=(
        "The first step, each token divided by its own quadratic mean, is the released code's (`group_num=1`; more"
        " groups divide its channels); `group_num=None` leaves it out, as the paper's equations do. Only real tokens"
        " count. In the first `warmup_iters` training steps the batch's own statistic is used, so an output then"
        " depends on the whole batch and, in a decoder, on later tokens; afterwards, and always in evaluation, on the"
        " running statistic alone. The paper's translation models have it in the encoder, with layer normalization in"
        " the decoder, which is the default of an encoder-decoder here. Statistics move once for each backward pass,"
        " also under activation checkpointing and for each micro-batch of gradient accumulation; under"
        " DistributedDataParallel every process starts each step from the first one's. The training step stands apart"
        " from a compiled graph."
    ),
)

make_family(XFPowerNormConfig, "XFPowerNorm", ALL_HEADS, INFO)
