# SPDX-License-Identifier: Apache-2.0
"""Command R7B and Command A: `cohere2` -> `xformer`. Command R whose layers read a sliding window and turn, or read
all tokens and know no positions."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import cohere, llama
from .mistral import COMPONENTS as WINDOWED
from .mistral import attention
from .qwen2 import layer_types, windows

COMPONENTS = {**cohere.COMPONENTS, "attention": WINDOWED["attention"]}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    layers = [
        attention(window, bias=config.attention_bias, angles="none" if window is None else "global")
        for window in windows(config)
    ]
    return {
        **cohere.DECODER,
        **llama.by_layer(layers),
        "head": {"type": "linear", "scale": llama.factor_of(config, "logit_scale")},
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", "layout": "interleaved", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    kinds, window = layer_types(config)
    return {
        **llama.gated_activation(config, "hidden_act"),
        "num_key_value_heads": config.key_value_heads,
        "logit_scale": config.logit_scale,
        "attention_bias": config.layer(0).attention.bias,
        "layer_types": kinds,
        **({} if window is None else {"sliding_window": window}),
        "rope_parameters": rope_parameters(rotary_of(config, "interleaved")),
    }


CONVERTER = register(
    Converter(
        model_type="cohere2",
        variant="xformer",
        native=False,
        fields=cohere.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=llama.GROUPS,
        heads=decoder_heads("Cohere2", sequence=False, token=False, spans=None),
        components=COMPONENTS,
        per_layer=True,
        # the size of windows where no layer has one
        unread=("hidden_act", "rope_parameters", "sliding_window"),
    )
)
