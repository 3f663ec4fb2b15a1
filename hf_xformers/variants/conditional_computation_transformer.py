# SPDX-License-Identifier: Apache-2.0
"""Conditional Computation Transformer (Bapna et al. 2020): gates that spend computation where it helps."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFConditionalComputationTransformerConfig(XFormerConfig):
    """Conditional Computation Transformer (Bapna et al. 2020): gates that spend computation where it helps.

    `stack={"type": "conditional_computation", "budget": p}` says which share of the gates is to be open.
    """

    model_type = "xf_conditional_computation_transformer"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = "conditional"
    cross_attention: SpecLike = "conditional"
    residual: SpecLike = "bare"
    feedforward: SpecLike = "conditional"
    stack: SpecLike = "conditional_computation"


INFO = VariantInfo(
    section="6.3",
    summary="gates per token and sublayer, trained to a budget",
    paper="Bapna et al. 2020",
    url="https://arxiv.org/abs/2002.07106",
    equation=(
        r"x \leftarrow x + g(x) \odot f(x), \quad g = \sigma(G(x) + \alpha \epsilon) \text{ in training}, \quad "
        r"g = \mathbb{1}[G(x) \ge 0] \text{ in evaluation}, \quad \mathcal{L}_b = |\bar{g} - p|"
    ),
    cost="training as dense; evaluation: feed-forward time in proportion to the open gates",
    notes=(
        "Feed-forward sublayers consist of 4 parts with a gate each; attention has a gate for the asking and one for"
        " the read token. Each tower of an encoder-decoder has a budget loss of its own. The noise grows with the"
        " number of training passes (`noise_steps`): gates of a model trained for much fewer are not yet decided."
    ),
    cite="bapna2020controlling",
)

make_family(XFConditionalComputationTransformerConfig, "XFConditionalComputationTransformer", ALL_HEADS, INFO)
