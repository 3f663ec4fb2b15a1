# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4 mini: `phi3` -> `xformer`. Llama with fused projections, LongRoPE and partly rotated heads.

Where a text outgrows `original_max_position_embeddings` while it is generated, transformers reads it anew; ours turns
the keys of its cache by the new frequencies, and keeps the states that deeper layers have made.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ...position.rotary_scaling import LongRopeScaling
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied, joined
from . import llama
from .mistral import COMPONENTS, attention, window_of

FIELDS = {mine: theirs for mine, theirs in llama.FIELDS.items() if mine != "num_key_value_heads"}
FIELDS["hidden_dropout_prob"] = ("resid_pdrop", "embd_pdrop")


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours = "@layers.{i}", "@trunk.layers.{i}"
    rows = config.head_width * config.num_attention_heads
    few, inner = config.head_width * config.key_value_heads, config.intermediate_size
    return (
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        joined(
            f"{own}.self_attn.qkv_proj.weight",
            tuple(f"{ours}.attention.{x}_proj.weight" for x in "qkv"),
            (rows, few, few),
            "fused query, key and value",
        ),
        copied(f"{own}.self_attn.o_proj.weight", f"{ours}.attention.o_proj.weight"),
        joined(
            f"{own}.mlp.gate_up_proj.weight",
            tuple(f"{ours}.feedforward.{x}_proj.weight" for x in ("gate", "up")),
            (inner, inner),
            "fused gate and input",
        ),
        copied(f"{own}.mlp.down_proj.weight", f"{ours}.feedforward.down_proj.weight"),
        copied(f"{own}.input_layernorm.weight", f"{ours}.attention_residual.norm.weight"),
        copied(f"{own}.post_attention_layernorm.weight", f"{ours}.feedforward_residual.norm.weight"),
        copied("@norm.weight", "@trunk.final_norm.weight"),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **{name: value for name, value in llama.DECODER.items() if name != "hidden_dropout_prob"},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": llama.own_width(config),
        "attention": attention(config.sliding_window, bias=False),
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters, partial=True)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec = rotary_of(config)
    scaling = spec.scaling
    original = scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else None
    return {
        **llama.gated_activation(config, "hidden_act"),
        "num_key_value_heads": config.key_value_heads,
        "sliding_window": window_of(config),
        "rope_parameters": rope_parameters(spec, partial=True),
        **llama.width_beside(config),
        **({} if original is None else {"original_max_position_embeddings": original}),
    }


CONVERTER = register(
    Converter(
        model_type="phi3",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Phi3", spans=None),
        components=COMPONENTS,
        training_only=("embd_pdrop",),
        # read with LongRoPE alone, where `rope_parameters` repeat it
        unread=("hidden_act", "rope_parameters", "original_max_position_embeddings"),
    )
)
