# SPDX-License-Identifier: Apache-2.0
"""Admin (Liu et al. 2020): post-norm layers whose shortcuts start with a weight that keeps deep stacks stable."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFAdminConfig(XFormerConfig):
    """Admin (Liu et al. 2020): post-norm layers whose shortcuts start with a weight that keeps deep stacks stable."""

    model_type = "xf_admin"

    hidden_size: int = 512
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    residual: SpecLike = "admin"
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="5.2",
    summary="post-norm with a learned weight on each shortcut, started so that deep stacks stay stable",
    paper="Liu et al. 2020",
    url="https://arxiv.org/abs/2004.08249",
    equation=(
        r"x_i = \mathrm{LN}(x_{i-1} \odot \omega_i + f_i(x_{i-1})), \qquad \omega_i^2 = "
        r"\frac{n + 1}{\ln(n + 1)} - 1 \text{ at the start, for } n \text{ sublayers}"
    ),
    cost="that of the vanilla Transformer; D more parameters per sublayer",
    cite="liu2020understanding",
    notes=(
        "The start is the authors' later one, which needs no data. `residual={'type': 'admin', 'start': 'profile'}` is"
        " the paper's, omega_i^2 = 1 + sum over j < i of Var[f_j(x_{j-1})]: call"
        " `hf_xformers.normalization.admin.profile(model, **batch)` once before training, which refuses to start"
        " otherwise. XFormerTrainer leaves omega out of weight decay."
    ),
)

make_family(XFAdminConfig, "XFAdmin", ALL_HEADS, INFO)
