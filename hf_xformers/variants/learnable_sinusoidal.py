# SPDX-License-Identifier: Apache-2.0
"""Sinusoids with learned frequencies (Wang et al. 2021): few parameters, any length, invariant to shifts."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLearnableSinusoidalConfig(XFormerConfig):
    """Sinusoids with learned frequencies (Wang et al. 2021): few parameters, any length, invariant to shifts."""

    model_type = "xf_learnable_sinusoidal"

    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    embedding: SpecLike = preset({"type": "token", "scale": True, "normalize": True})
    head: SpecLike = "transform"
    position: SpecLike = "learnable_sinusoidal"


INFO = VariantInfo(
    section="5.1",
    summary="input sinusoids whose frequencies are learned",
    paper="Wang et al. 2021",
    url="https://openreview.net/forum?id=onxoVA9FxMw",
    equation=r"x_t + \big(\sin(\omega_i t), \cos(\omega_i t)\big)_{i < D/2}, \qquad \omega \text{ learned}",
    cost="time O(T^2 D), memory O(T D) with fused kernels; D / 2 parameters",
    cite="wang2021position",
    notes=(
        "Its relative form is the position `learnable_sinusoidal_relative`. XFormerTrainer leaves the frequencies out"
        " of weight decay. The factor sqrt(D) on token vectors is ours: next to sinusoids of amplitude one BERT's"
        " small vectors would not be heard."
    ),
)

make_family(XFLearnableSinusoidalConfig, "XFLearnableSinusoidal", ALL_HEADS, INFO)
