# SPDX-License-Identifier: Apache-2.0
"""ScaleNorm (Nguyen and Salazar 2019): vectors of one learned length, token vectors of unit length."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFScaleNormConfig(XFormerConfig):
    """ScaleNorm (Nguyen and Salazar 2019): vectors of one learned length, token vectors of unit length."""

    model_type = "xf_scale_norm"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "small"
    embedding: SpecLike = "fix_norm"
    position: SpecLike = "sinusoidal_absolute"
    normalization: SpecLike = "scale_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"
    head: SpecLike = "fix_norm"


INFO = VariantInfo(
    section="5.2",
    summary="one learned length replaces layer normalization; token vectors have unit length",
    paper="Nguyen and Salazar 2019",
    url="https://arxiv.org/abs/1910.05895",
    equation=(
        r"\mathrm{ScaleNorm}(x) = g \, \frac{x}{\lVert x \rVert}, \qquad \tilde E_w = \frac{E_w}{\lVert E_w \rVert} "
        r"\text{ (input and output)}"
    ),
    cost="that of the vanilla Transformer, with one parameter per norm",
    cite="nguyen2019transformers",
    notes=(
        "The three parts of the paper together: PreNorm with ScaleNorm (also after the last layer), FixNorm on the "
        "table and SmallInit. `inputs_embeds` are brought to unit length as table rows are."
    ),
)

make_family(XFScaleNormConfig, "XFScaleNorm", ALL_HEADS, INFO)
