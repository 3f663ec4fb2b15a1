# SPDX-License-Identifier: Apache-2.0
"""DeepSeekMoE (Dai et al. 2024): many narrow experts next to a shared one, balanced without a loss."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFDeepSeekMoEConfig(XFormerConfig):
    """DeepSeekMoE (Dai et al. 2024): many narrow experts next to a shared one, balanced without a loss."""

    model_type = "xf_deepseek_moe"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float = 1e-6
    position: SpecLike = "rotary"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset(
        {
            "type": "deepseek_moe",
            "num_experts": 16,
            "topk": 4,
            "expert_size": 512,
            "shared_size": 512,
        }
    )


INFO = VariantInfo(
    section="5.3",
    summary="the best k of many narrow gated experts, and one that all tokens share",
    paper="Dai et al. 2024",
    url="https://arxiv.org/abs/2401.06066",
    equation=(
        r"s = \sigma(W x), \quad C = \mathrm{top}_k(s + b), \qquad y = \mathrm{FFN}_0(x) + \sum_{e \in C}"
        r" \frac{s_e}{\sum_{c \in C} s_c} \mathrm{FFN}_e(x)"
    ),
    cost=(
        "time of a network as wide as k experts and the shared one, plus O(T E D) for the router; parameters of all"
        " experts"
    ),
    notes=(
        "Scores and biases are those of DeepSeek-V3 (arXiv 2412.19437): after each step of the optimizer the bias b_e"
        " of an expert rises or falls by `balance_rate`, as fewer or more tokens than the mean have chosen it; no loss"
        " balances them. `--feedforward.groups` bounds from where experts are chosen. DeepSpeed's optimizers hold"
        " copies of the router, which the biases do not follow. `--objective mtp` also trains a module for the token"
        " behind the next one (`ForMultiTokenPrediction`), which then drafts it (`generate(use_mtp=True)`)."
    ),
    cite="dai2024deepseekmoe",
)

make_family(XFDeepSeekMoEConfig, "XFDeepSeekMoE", (*ALL_HEADS, "ForMultiTokenPrediction"), INFO)
