# SPDX-License-Identifier: Apache-2.0
"""StarCoder 2: `starcoder2` -> `xformer`. Mistral with layer normalization, biases, and a network without a gate."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule
from . import gemma2, llama, mistral

COMPONENTS = {**mistral.COMPONENTS, "normalization": ("layer_norm",)}
FIELDS = {
    **llama.FIELDS,
    "layer_norm_eps": "norm_epsilon",
    "hidden_dropout_prob": ("residual_dropout", "embedding_dropout"),
}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    network = llama.network_rules(config, up="c_fc", down="c_proj")
    return (*llama.attention_rules(config), *network, *llama.frame(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        "hidden_dropout_prob": config.residual_dropout,
        "normalization": "layer_norm",
        "head_dim": llama.own_width(config),
        "attention": mistral.attention(config.sliding_window, bias=config.use_bias),
        "feedforward": feedforward(config.hidden_act, bias=config.use_bias),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "hidden_act": gemma2.published_name(activation(config.feedforward)[0]),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "use_bias": config.attention.bias,
        "sliding_window": mistral.window_of(config),
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="starcoder2",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Starcoder2", spans=None),
        components=COMPONENTS,
        training_only=("embedding_dropout",),
        unread=("hidden_act", "rope_parameters"),
    )
)
