# SPDX-License-Identifier: Apache-2.0
"""XLNet (Yang et al. 2019): permuted language modeling with two streams over relative positions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFXLNetConfig(XFormerConfig):
    """XLNet (Yang et al. 2019): permuted language modeling with two streams over relative positions.

    The sizes are those of `xlnet-base-cased`. The inputs `perm_mask` [B, T, T] (1 where a token must not see another)
    and `target_mapping` [B, M, T] (1 where a target stands) make the second stream, and `labels` are then [B, M].
    """

    model_type = "xf_xlnet"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {
            "head": {"type": "linear", "bias": True},
        },
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "head": {"type": "linear", "bias": True},
        },
    }

    layer_norm_eps: float = 1e-12
    activation_dropout_prob: float | int = 0.1
    classifier_pooling: Literal["auto", "first", "mean", "last", "late_mean", "attention"] = "last"
    classifier_activation: str = "tanh"
    position: SpecLike = "none"  # in the attention's scores
    attention: SpecLike = preset(
        {
            "type": "transformer_xl",
            "bias": False,
            "share_biases": False,
            "segments": True,
        }
    )
    stack: SpecLike = "two_stream"


INFO = VariantInfo(
    section="7",
    summary="two streams predict tokens in any order",
    paper="Yang et al. 2019",
    url="https://arxiv.org/abs/1906.08237",
    equation=(
        r"g_{z_t} \leftarrow \mathrm{Attention}(Q = g_{z_t}, KV = h_{z_{<t}}), \qquad "
        r"h_{z_t} \leftarrow \mathrm{Attention}(Q = h_{z_t}, KV = h_{z_{\le t}})"
    ),
    cost="time O(T^2 D), and as much again for queries by the share of tokens that are targets; memory O(T)",
    notes=(
        "Without `perm_mask` and `target_mapping` it is an encoder with Transformer-XL's relative positions and a term"
        " for pairs of one segment (`token_type_ids`). A target that sees no token reads nothing but its place. The"
        " memory of earlier segments is that of `xf_transformer_xl`."
    ),
    cite="yang2019xlnet",
)

make_family(XFXLNetConfig, "XFXLNet", ENCODER_HEADS, INFO)
