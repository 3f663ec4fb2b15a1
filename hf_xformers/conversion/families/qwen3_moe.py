# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 with experts: `qwen3_moe` -> `xformer`. Qwen 3 with experts in all layers or some; all layers read a sliding
window, where there is one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule
from . import expert_layers, llama
from .mistral import COMPONENTS, attention, window_of
from .qwen2 import FIELDS
from .qwen3 import NORMS


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*llama.attention_rules(config), *NORMS, *expert_layers.rules(config), *llama.frame(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    own = attention(config.sliding_window, bias=config.attention_bias, query_key_norm="head")
    networks = expert_layers.networks(
        config,
        expert_layers.steps(config),
        normalize=config.norm_topk_prob,
        expert_size=config.moe_intermediate_size,
    )
    return {
        **llama.DECODER,
        **llama.by_layer([own] * config.num_hidden_layers, networks),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": llama.own_width(config),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec, view = expert_layers.experts_of(config), config.layer(0)
    window = window_of(view)
    return {
        **expert_layers.count_fields(config),
        **expert_layers.step_fields(config),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "norm_topk_prob": spec.normalize,
        "moe_intermediate_size": spec.expert_size or config.intermediate_size,
        "attention_bias": view.attention.bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="qwen3_moe",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Qwen3Moe", spans="transformer."),
        components=COMPONENTS,
        per_layer=True,
        training_only=expert_layers.TRAINING,
        # several steps may mean the same layers
        unread=("rope_parameters", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers"),
    )
)
