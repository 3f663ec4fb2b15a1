# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-AI 2024): a cache of one short vector per token."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMultiHeadLatentAttentionConfig(XFormerConfig):
    """Multi-head latent attention (DeepSeek-AI 2024): a cache of one short vector per token.

    Attention has the widths of DeepSeek-V2 (`--attention.kv_lora_rank` and others); its experts are not part of this
    family.
    """

    model_type = "xf_multi_head_latent_attention"

    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    position: SpecLike = preset({"type": "rotary", "layout": "interleaved"})
    attention: SpecLike = "multi_head_latent_attention"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "swiglu", "bias": False})


INFO = VariantInfo(
    section="successors",
    summary="all keys and values from one latent vector per token",
    paper="DeepSeek-AI 2024",
    url="https://arxiv.org/abs/2405.04434",
    equation=(
        r"c_j = \mathrm{RMSNorm}(W_c x_j), \quad r_j = R_j W_r x_j, \qquad o_i = \sum_j \mathrm{softmax}_j \Big("
        r" \frac{n_i^\top W_k c_j + (R_i p_i)^\top r_j}{\sqrt{d_n + d_r}} \Big) W_v c_j"
    ),
    cost="time O(T^2 D), memory O(T D); a cache of c + r numbers per token and layer, whatever the number of heads",
    notes=(
        "A step of generation scores the latents themselves and makes no keys or values. A rotation turns r channels"
        " of each head's queries, and one vector of each token."
    ),
    cite="deepseek2024v2",
)

make_family(XFMultiHeadLatentAttentionConfig, "XFMultiHeadLatentAttention", ALL_HEADS, INFO)
