# SPDX-License-Identifier: Apache-2.0
"""Qwen 3: `qwen3` -> `xformer`. Llama that normalizes the queries and keys of each head; layers read all tokens or a
sliding window, as `layer_types` says."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama
from .mistral import COMPONENTS
from .qwen2 import layers, window_fields

# Of queries and keys, in all layers.
NORMS = tuple(
    copied(f"@layers.{{i}}.self_attn.{x}_norm.weight", f"@trunk.layers.{{i}}.attention.{x}_norm.weight") for x in "qk"
)


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*llama.backbone(config), *NORMS)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        **layers(config, {"bias": config.attention_bias, "query_key_norm": "head"}),
        "head_dim": config.head_dim,
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.head_width(config),
        **llama.gated_activation(config, "hidden_act"),
        **window_fields(config),
        "attention_bias": config.layer(0).attention.bias,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="qwen3",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Qwen3", spans="transformer."),
        components=COMPONENTS,
        per_layer=True,
        # which layers have a window is what `layer_types` says, and its size is theirs
        unread=("hidden_act", "rope_parameters", "max_window_layers", "use_sliding_window", "sliding_window"),
    )
)
