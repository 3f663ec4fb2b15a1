# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: `gemma2` -> `xformer`. Sublayers are normalized on both sides, by weights that are added to 1; scores and
logits are capped; every other layer reads a sliding window.

With attention "sdpa" transformers leaves the cap of scores out; ours is that of its "eager" in every implementation.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama
from .mistral import COMPONENTS as WINDOWED
from .qwen2 import layer_types, layers

COMPONENTS = {**WINDOWED, "residual": ("peri_ln",)}
# What both generations are.
DECODER: dict[str, Any] = {
    **llama.DECODER,
    "embedding": {"type": "token", "scale": True},
    "normalization": {"type": "rms_norm", "from_zero": True},
    "residual": "peri_ln",
}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours = "@layers.{i}", "@trunk.layers.{i}"
    return (
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        *llama.projections(config),
        copied(f"{own}.input_layernorm.weight", f"{ours}.attention_residual.norm.weight"),
        copied(f"{own}.post_attention_layernorm.weight", f"{ours}.attention_residual.output_norm.weight"),
        copied(f"{own}.pre_feedforward_layernorm.weight", f"{ours}.feedforward_residual.norm.weight"),
        copied(f"{own}.post_feedforward_layernorm.weight", f"{ours}.feedforward_residual.output_norm.weight"),
        copied("@norm.weight", "@trunk.final_norm.weight"),
    )


def scale(config: PreTrainedConfig) -> dict[str, Any]:
    """The factor on scores of our attention: 1 / sqrt(`query_pre_attn_scalar`)."""
    scalar = config.query_pre_attn_scalar
    return {} if scalar == config.head_dim else {"scale": scalar**-0.5}


def fields_of_attention(config: XFormerConfig) -> dict[str, Any]:
    """Their fields that our attention says."""
    attention, (kinds, window) = config.layer(0).attention, layer_types(config)
    return {
        **llama.head_width(config),
        "attention_bias": attention.bias,
        "query_pre_attn_scalar": config.head_width if attention.scale is None else round(attention.scale**-2),
        "layer_types": kinds,
        **({} if window is None else {"sliding_window": window}),
    }


def activation_fields(config: XFormerConfig) -> dict[str, str]:
    found = llama.gated_activation(config, "hidden_activation")["hidden_activation"]
    return {"hidden_activation": published_name(found)}


def published_name(activation: str) -> str:
    """The name that published configs of these families have for the same function."""
    return "gelu_pytorch_tanh" if activation == "gelu_new" else activation


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    llama.refuse_other(config, use_bidirectional_attention=None)
    of_all = {"bias": config.attention_bias, "score_cap": config.attn_logit_softcapping, **scale(config)}
    return {
        **DECODER,
        **layers(config, of_all),
        "head_dim": config.head_dim,
        "head": {"type": "linear", "cap": config.final_logit_softcapping},
        "feedforward": feedforward(config.hidden_activation, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **fields_of_attention(config),
        **activation_fields(config),
        "attn_logit_softcapping": config.layer(0).attention.score_cap,
        "final_logit_softcapping": getattr(config.head, "cap", None),
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="gemma2",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Gemma2", spans=None),
        components=COMPONENTS,
        per_layer=True,
        # the size of windows where no layer has one
        unread=("hidden_activation", "rope_parameters", "sliding_window"),
    )
)
