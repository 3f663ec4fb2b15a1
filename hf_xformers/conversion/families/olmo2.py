# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: `olmo2` -> `xformer`. Llama that normalizes what sublayers give and not what they read, and queries and keys
over all heads."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama
from .qwen3 import NORMS


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    ours = "@trunk.layers.{i}"
    return (
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        *llama.projections(config),
        *NORMS,
        copied("@layers.{i}.post_attention_layernorm.weight", f"{ours}.attention_residual.norm.weight"),
        copied("@layers.{i}.post_feedforward_layernorm.weight", f"{ours}.feedforward_residual.norm.weight"),
        copied("@norm.weight", "@trunk.final_norm.weight"),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        "residual": "res_post_ln",
        "head_dim": llama.own_width(config),
        "attention": {"type": "dense", "bias": config.attention_bias, "query_key_norm": "projection"},
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.gated_activation(config, "hidden_act"),
        "num_key_value_heads": config.key_value_heads,
        **llama.width_beside(config),
        "attention_bias": config.attention.bias,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="olmo2",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Olmo2", token=False, spans=None),
        components={**llama.COMPONENTS, "residual": ("res_post_ln",)},
        unread=("hidden_act", "rope_parameters"),
    )
)
