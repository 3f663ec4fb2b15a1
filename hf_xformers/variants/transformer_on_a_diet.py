# SPDX-License-Identifier: Apache-2.0
"""Transformer on a Diet (Wang et al. 2020): a few keys per token, chosen by the layer."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFTransformerOnADietConfig(XFormerConfig):
    """Transformer on a Diet (Wang et al. 2020): a few keys per token, chosen by the layer."""

    model_type = "xf_transformer_on_a_diet"

    hidden_size: int = 320
    num_hidden_layers: int = 3
    num_attention_heads: int = 16
    intermediate_size: int = 2000
    hidden_dropout_prob: float | int = 0.4
    attention_probs_dropout_prob: float | int = 0.25
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True, "normalize": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = preset({"type": "transformer_on_a_diet", "bias": False})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="4.1",
    summary="each layer reads a few tokens at a distance that grows with depth, or a window that does",
    paper="Wang et al. 2020",
    url="https://arxiv.org/abs/2002.06170",
    equation=(
        r"o_i^l = \mathrm{softmax}_{N_l(i)}\!\left(\frac{q_i K^\top}{\sqrt{d}}\right) V, \quad N_l(i) = \{j : 0 \le i"
        r" - j < w M^l\} \ \text{(cascade)}, \quad N_l(i) = \{i - t B^l : 0 \le t < K\} \ \text{(dilated)}"
    ),
    cost="time and memory O(T w M^l D) in layer l (cascade), O(T K D) (dilated), O(T K l D) (dilated_mem)",
    cite="wang2020transformer",
    notes=(
        "Sizes and dropout are those for the Penn Treebank, where windows of 4, 8 and 16 tokens let the last layer see"
        " 26: for longer texts take more layers, of which twelve see 4096 tokens and more (dilated: 8191), or a wider"
        " first window. attention={'type': 'transformer_on_a_diet', 'diet_type': 'dilated'} is the second form,"
        " 'dilated_mem' the third. Encoders are not in the paper."
    ),
)

make_family(XFTransformerOnADietConfig, "XFTransformerOnADiet", ALL_HEADS, INFO)
