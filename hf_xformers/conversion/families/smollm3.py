# SPDX-License-Identifier: Apache-2.0
"""SmolLM 3: `smollm3` -> `xformer`. Llama some of whose layers know no positions; layers may read a sliding window."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import llama
from .mistral import COMPONENTS, attention
from .qwen2 import FIELDS, layer_types, windows


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    turned = [{} if turns else {"angles": "none"} for turns in config.no_rope_layers]
    layers = [
        attention(window, bias=config.attention_bias, **angles) for window, angles in zip(windows(config), turned)
    ]
    return {
        **llama.DECODER,
        **llama.by_layer(layers),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": llama.own_width(config),
        "feedforward": feedforward(config.hidden_act, gated=True, bias=config.mlp_bias),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def interval(turning: list[int]) -> int:
    """The n of which every n-th layer knows no positions; theirs by default where there is none."""
    numbers = (4, *range(1, len(turning) + 1))
    return next((n for n in numbers if turning == [int(i % n > 0) for i in range(1, len(turning) + 1)]), 4)


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    kinds, window = layer_types(config)
    attentions = [config.layer(index).attention for index in range(config.num_hidden_layers)]
    turning = [int(attention.angles != "none") for attention in attentions]
    return {
        **llama.gated_activation(config, "hidden_act"),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "no_rope_layers": turning,
        "no_rope_layer_interval": interval(turning),
        "layer_types": kinds,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "attention_bias": attentions[0].bias,
        "mlp_bias": config.feedforward.bias,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="smollm3",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=llama.GROUPS,
        heads=decoder_heads("SmolLM3", spans="transformer."),
        components=COMPONENTS,
        per_layer=True,
        # which layers have a window or turn is what `layer_types` and `no_rope_layers` say
        unread=("hidden_act", "rope_parameters", "no_rope_layer_interval", "use_sliding_window", "sliding_window"),
    )
)
