# SPDX-License-Identifier: Apache-2.0
"""Mixtral: `mixtral` -> `xformer`. Mistral with experts in every layer.

With `output_router_logits` transformers adds a loss that balances the experts of all layers at once: refused.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule
from . import expert_layers, llama, mistral


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*llama.attention_rules(config), *expert_layers.rules(config), *llama.frame(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        "head_dim": llama.own_width(config),
        "attention": mistral.attention(config.sliding_window, bias=False),
        "feedforward": expert_layers.experts(config),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        **expert_layers.count_fields(config),
        "sliding_window": mistral.window_of(config),
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="mixtral",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Mixtral"),
        components={**mistral.COMPONENTS, "feedforward": (expert_layers.TYPE,)},
        training_only=(*expert_layers.TRAINING, "router_jitter_noise"),
        unread=("rope_parameters", "head_dim"),  # None is the usual width
    )
)
