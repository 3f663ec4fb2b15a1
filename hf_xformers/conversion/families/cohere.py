# SPDX-License-Identifier: Apache-2.0
"""Command R: `cohere` -> `xformer`. Attention and network side by side behind one norm, pairs of neighboring channels
that turn, and a factor on logits."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama

FIELDS = {**llama.FIELDS, "layer_norm_eps": "layer_norm_eps"}
COMPONENTS = {**llama.COMPONENTS, "normalization": ("layer_norm",), "block": ("parallel",)}
# What both generations are.
DECODER: dict[str, Any] = {
    **llama.DECODER,
    "normalization": {"type": "layer_norm", "bias": False},
    "block": {"type": "parallel", "shared_norm": True},
}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours = "@layers.{i}.self_attn", "@trunk.layers.{i}.attention"
    normed = config.attention.query_key_norm == "each_head"
    norms = [copied(f"{own}.{x}_norm.weight", f"{ours}.{x}_norm.weight") for x in "qk" if normed]
    return (*llama.backbone(config), *norms)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **DECODER,
        "head_dim": llama.own_width(config),
        "head": {"type": "linear", "scale": llama.factor_of(config, "logit_scale")},
        "attention": {
            "type": "dense",
            "bias": config.attention_bias,
            "query_key_norm": "each_head" if config.use_qk_norm else "none",
        },
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", "layout": "interleaved", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.gated_activation(config, "hidden_act"),
        **llama.width_beside(config),
        "num_key_value_heads": config.key_value_heads,
        "logit_scale": config.logit_scale,
        "attention_bias": config.attention.bias,
        "use_qk_norm": config.attention.query_key_norm != "none",
        "rope_parameters": rope_parameters(rotary_of(config, "interleaved")),
    }


CONVERTER = register(
    Converter(
        model_type="cohere",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Cohere", sequence=False, token=False, spans=None),
        components=COMPONENTS,
        unread=("hidden_act", "rope_parameters"),
    )
)
