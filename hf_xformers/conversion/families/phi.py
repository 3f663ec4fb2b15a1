# SPDX-License-Identifier: Apache-2.0
"""Phi 1, 1.5 and 2: `phi` -> `xformer`. Attention and network side by side behind one layer norm, biases everywhere,
and partly rotated heads."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama

COMPONENTS = {**llama.COMPONENTS, "normalization": ("layer_norm",), "block": ("parallel",)}
FIELDS = {
    **llama.FIELDS,
    "layer_norm_eps": "layer_norm_eps",
    "hidden_dropout_prob": ("resid_pdrop", "embd_pdrop"),
}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours = "@layers.{i}.self_attn", "@trunk.layers.{i}.attention"
    normed = config.attention.query_key_norm == "head"
    return (
        *llama.attention_rules(config, output="dense"),
        *llama.network_rules(config, up="fc1", down="fc2"),
        *(copied(f"{own}.{x}_layernorm.*", f"{ours}.{x}_norm.*") for x in "qk" if normed),
        *llama.frame(config, last="final_layernorm"),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        "hidden_dropout_prob": config.resid_pdrop,
        "normalization": "layer_norm",
        "block": {"type": "parallel", "shared_norm": True},
        "head": {"type": "linear", "bias": True},
        "head_dim": llama.own_width(config),
        "attention": {"type": "dense", "query_key_norm": "head" if config.qk_layernorm else "none"},
        "feedforward": feedforward(config.hidden_act),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters, partial=True)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation(config.feedforward)[0],
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "qk_layernorm": config.attention.query_key_norm != "none",
        "rope_parameters": rope_parameters(rotary_of(config), partial=True),
    }


CONVERTER = register(
    Converter(
        model_type="phi",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone, "lm": (copied("lm_head.*", "lm_head.decoder.*"),)},
        heads=decoder_heads("Phi", spans=None),
        components=COMPONENTS,
        training_only=("embd_pdrop",),
        unread=("hidden_act", "rope_parameters"),
    )
)
