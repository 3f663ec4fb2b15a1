# SPDX-License-Identifier: Apache-2.0
"""DiffLlama: `diffllama` -> `xformer`. Llama with differential attention."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama

VECTORS = tuple(
    copied(f"@layers.{{i}}.self_attn.lambda_{x}", f"@trunk.layers.{{i}}.attention.lambda_{x}")
    for x in ("q1", "k1", "q2", "k2")
)


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*llama.backbone(config), *VECTORS)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        "head_dim": config.head_dim,
        "attention": {
            **{"type": "differential_attention", "pairing": "halves", "norm_weight": False},
            "bias": config.attention_bias,
            "lambda_std": config.lambda_std_dev,
        },
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.head_width(config),
        **llama.gated_activation(config, "hidden_act"),
        "attention_bias": config.attention.bias,
        "lambda_std_dev": getattr(config.attention, "lambda_std", 0.1),
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="diffllama",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("DiffLlama", spans="transformer."),
        components={**llama.COMPONENTS, "attention": ("differential_attention",)},
        unread=("hidden_act", "rope_parameters"),
    )
)
