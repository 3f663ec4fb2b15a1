# SPDX-License-Identifier: Apache-2.0
"""Switch Transformer (Fedus et al. 2022): each token chooses one of many feed-forward experts."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFSwitchTransformerConfig(XFormerConfig):
    """Switch Transformer (Fedus et al. 2022): each token chooses one of many feed-forward experts.

    All weights start at a tenth of T5's variance (section 2.4), those of experts and routers by their `init_scale`;
    `initializer_factor=1.0` is T5's own start.
    """

    model_type = "xf_switch_transformer"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base_8": {
            "feedforward": {"type": "switch_transformer", "num_experts": 8},
        },
    }

    vocab_size: int = 32128
    initializer: Initializer = "t5"
    initializer_factor: float | int = 0.1**0.5
    layer_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = 1
    position: SpecLike = "t5_relative_bias"
    attention: SpecLike = preset({"type": "dense", "bias": False, "scale": 1.0})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False, "scale": 1.0})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = preset({"type": "pre_ln", "final_dropout": True})
    feedforward: SpecLike = "switch_transformer"
    head: SpecLike = preset({"type": "linear", "scale": True})


INFO = VariantInfo(
    section="5.3",
    summary="a router sends each token to one of many feed-forward experts, up to a capacity",
    paper="Fedus et al. 2022",
    url="https://arxiv.org/abs/2101.03961",
    equation=r"p = \mathrm{softmax}(W_r x), \qquad i = \arg\max_e p_e, \qquad y = p_i \, \mathrm{FFN}_i(x)",
    cost="time and memory of the dense model plus O(T E D) for the router; E times its feed-forward parameters",
    cite="fedus2022switch",
    notes=(
        "Shaped like T5 base, the paper's host; any head can stand on it. In training an expert takes of each text "
        "its first 1.25 T / E tokens; queues are per text and in token order, so an output depends neither on other "
        "texts of the batch nor on what later tokens hold (only on how many there are). Evaluation is without a "
        "capacity, so that generation gives what a pass over the whole text gives; `eval_capacity_factor: 2.0` is "
        "the paper's."
    ),
)

make_family(XFSwitchTransformerConfig, "XFSwitchTransformer", ALL_HEADS, INFO)
