# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 and 2 with experts: `qwen2_moe` -> `xformer`. Qwen 2 with experts, and a gated network that all tokens
share, in all layers or some."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule
from . import expert_layers, llama
from .mistral import COMPONENTS, attention
from .qwen2 import FIELDS, layer_types, windows


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*llama.attention_rules(config), *expert_layers.rules(config), *llama.frame(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    attentions = [attention(window, bias=config.qkv_bias, output_bias=False) for window in windows(config)]
    networks = expert_layers.networks(
        config,
        expert_layers.steps(config),
        normalize=config.norm_topk_prob,
        expert_size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return {
        **llama.DECODER,
        **llama.by_layer(attentions, networks),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": llama.own_width(config),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec, (kinds, window) = expert_layers.experts_of(config), layer_types(config)
    return {
        **expert_layers.count_fields(config),
        **expert_layers.step_fields(config),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "norm_topk_prob": spec.normalize,
        "moe_intermediate_size": spec.expert_size or config.intermediate_size,
        "shared_expert_intermediate_size": spec.shared_size or config.intermediate_size,
        "qkv_bias": config.layer(0).attention.bias,
        "layer_types": kinds,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="qwen2_moe",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Qwen2Moe"),
        components=COMPONENTS,
        per_layer=True,
        training_only=expert_layers.TRAINING,
        # `layer_types` says which layers have a window; several steps may mean the same layers
        unread=(
            *("rope_parameters", "max_window_layers", "use_sliding_window", "sliding_window"),
            *("decoder_sparse_step", "mlp_only_layers"),
        ),
    )
)
