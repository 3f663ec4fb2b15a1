# SPDX-License-Identifier: Apache-2.0
"""OLMo 3: `olmo3` -> `xformer`. OLMo 2 whose layers read all tokens or a sliding window, with a rotation for each."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from . import llama, olmo2
from .gemma3_text import position, rotations
from .mistral import COMPONENTS
from .qwen2 import layer_types, layers


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        **layers(config, {"bias": config.attention_bias, "query_key_norm": "projection"}, {"angles": "local"}),
        "residual": "res_post_ln",
        "head_dim": llama.own_width(config),
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": position(config),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    kinds, window = layer_types(config)
    return {
        **llama.gated_activation(config, "hidden_act"),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "attention_bias": config.layer(0).attention.bias,
        "layer_types": kinds,
        **({} if window is None else {"sliding_window": window}),
        "rope_parameters": rotations(config),
    }


CONVERTER = register(
    Converter(
        model_type="olmo3",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": olmo2.backbone},
        heads=decoder_heads("Olmo3", token=False, spans=None),
        components={**COMPONENTS, "residual": ("res_post_ln",)},
        per_layer=True,
        # the size of windows where no layer has one
        unread=("hidden_act", "rope_parameters", "sliding_window"),
    )
)
