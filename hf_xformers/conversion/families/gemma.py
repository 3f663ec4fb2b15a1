# SPDX-License-Identifier: Apache-2.0
"""Gemma: `gemma` -> `xformer`. Llama with norms whose weights are added to 1, and scaled token vectors."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from . import gemma2, llama

DECODER: dict[str, Any] = {**gemma2.DECODER, "residual": "pre_ln"}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if config.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention=True does not convert: every token reads the whole text.")
    return {
        **DECODER,
        "head_dim": config.head_dim,
        "attention": {"type": "dense", "bias": config.attention_bias},
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.head_width(config),
        "hidden_act": gemma2.activation_fields(config)["hidden_activation"],
        "attention_bias": config.attention.bias,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="gemma",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=llama.GROUPS,
        heads=decoder_heads("Gemma", spans=None),
        components=llama.COMPONENTS,
        unread=("hidden_act", "rope_parameters", "use_bidirectional_attention"),
    )
)
