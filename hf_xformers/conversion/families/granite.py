# SPDX-License-Identifier: Apache-2.0
"""Granite 3: `granite` -> `xformer`. Llama with factors on token vectors, on what sublayers add, on scores and on
logits."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import llama


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    width = llama.own_width(config)
    factor = config.attention_multiplier
    return {
        **llama.DECODER,
        "head_dim": width,
        "embedding": {"type": "token", "scale": llama.factor_of(config, "embedding_multiplier")},
        "residual": {"type": "pre_ln", "branch_scale": llama.factor_of(config, "residual_multiplier")},
        "head": {"type": "linear", "scale": 1 / llama.factor_of(config, "logits_scaling")},
        "attention": {
            "type": "dense",
            "bias": config.attention_bias,
            "scale": None if factor == width**-0.5 else factor,
        },
        "feedforward": feedforward(config.hidden_act, gated=True, bias=config.mlp_bias),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    attention, scale = config.attention, config.embedding.scale
    scale = config.hidden_size**0.5 if scale is True else float(scale or 1.0)
    return {
        **llama.gated_activation(config, "hidden_act"),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "embedding_multiplier": scale,
        "residual_multiplier": getattr(config.residual, "branch_scale", 1.0),
        "attention_multiplier": config.head_width**-0.5 if attention.scale is None else attention.scale,
        "logits_scaling": float(f"{1 / config.logit_scale:.12g}"),  # the inverse of an inverse
        "attention_bias": attention.bias,
        "mlp_bias": config.feedforward.bias,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="granite",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=llama.GROUPS,
        heads=decoder_heads("Granite", sequence=False, token=False, spans=None),
        components=llama.COMPONENTS,
        unread=("hidden_act", "rope_parameters"),
    )
)
