# SPDX-License-Identifier: Apache-2.0
"""Qwen 3.5, its language model: `qwen3_5_text` -> `xformer`. Qwen3-Next without experts, and with projections of
linear layers that stand apart. A text has one position in all of a rotation's sections for images."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied, joined
from . import llama
from .qwen2 import FIELDS
from .qwen3_next import LINEAR, attentions, fields_of_attention, full_rules, shared_linear_rules

SECTIONS = ("mrope_section", "mrope_interleaved")


def linear_rules(index: int, view: XFormerConfig) -> tuple[Rule, ...]:
    own, ours, spec = f"@layers.{index}.linear_attn", f"@trunk.layers.{index}.attention", view.attention
    keys, values = spec.key_heads * spec.key_width, spec.value_heads * spec.value_width
    return (
        joined(
            f"{own}.in_proj_qkv.weight",
            tuple(f"{ours}.{x}_proj.weight" for x in "qkv"),
            (keys, keys, values),
            "fused query, key and value",
        ),
        copied(f"{own}.in_proj_z.weight", f"{ours}.gate_proj.weight"),
        copied(f"{own}.in_proj_b.weight", f"{ours}.beta_proj.weight"),
        copied(f"{own}.in_proj_a.weight", f"{ours}.decay_proj.weight"),
        *shared_linear_rules(own, ours),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for index in range(config.num_hidden_layers):
        view = config.layer(index)
        rules += (linear_rules if view.attention.type == LINEAR else full_rules)(index, view)
    return (*rules, *llama.network_rules(config), *llama.frame(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    rotation = {name: value for name, value in config.rope_parameters.items() if name not in SECTIONS}
    return {
        **llama.DECODER,
        **llama.by_layer(attentions(config)),
        "normalization": {"type": "rms_norm", "from_zero": True},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(rotation, partial=True)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **fields_of_attention(config),
        **llama.gated_activation(config, "hidden_act"),
        "rope_parameters": rope_parameters(rotary_of(config), partial=True),
    }


CONVERTER = register(
    Converter(
        model_type="qwen3_5_text",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Qwen3_5", token=False, spans=None, stem="Qwen3_5Text"),
        components={**llama.COMPONENTS, "attention": ("dense", LINEAR)},
        per_layer=True,
        unread=("rope_parameters",),
    )
)
