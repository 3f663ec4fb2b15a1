# SPDX-License-Identifier: Apache-2.0
"""StableLM: `stablelm` -> `xformer`. Llama with layer normalization and partly rotated heads; the second generation
has norms of single heads and sublayers side by side."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, stacked
from . import llama

COMPONENTS = {**llama.COMPONENTS, "normalization": ("layer_norm",), "block": ("parallel", "vanilla")}
FIELDS = {**llama.FIELDS, "layer_norm_eps": "layer_norm_eps", "hidden_dropout_prob": "hidden_dropout"}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours, norms = "@layers.{i}.self_attn", "@trunk.layers.{i}.attention", []
    if config.attention.query_key_norm == "each_head":
        for x, count in (("q", config.num_attention_heads), ("k", config.key_value_heads)):
            heads = tuple(f"{own}.{x}_layernorm.norms.{head}.weight" for head in range(count))
            norms.append(stacked(heads, f"{ours}.{x}_norm.weight"))
    return (*llama.backbone(config), *norms)


def block(parallel: bool) -> dict[str, Any]:
    """Our block, with one norm where sublayers stand side by side."""
    return {"type": "parallel", "shared_norm": True} if parallel else {"type": "vanilla"}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    llama.refuse_other(config, head_dim=config.hidden_size // config.num_attention_heads)
    return {
        **llama.DECODER,
        "hidden_dropout_prob": config.hidden_dropout,
        "normalization": "layer_norm",
        "block": block(config.use_parallel_residual),
        "attention": {
            "type": "dense",
            "bias": config.use_qkv_bias,
            "output_bias": False,
            "query_key_norm": "each_head" if config.qk_layernorm else "none",
        },
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters, partial=True)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **llama.gated_activation(config, "hidden_act"),
        "num_key_value_heads": config.key_value_heads,
        "use_qkv_bias": config.attention.bias,
        "qk_layernorm": config.attention.query_key_norm != "none",
        "use_parallel_residual": config.block.type == "parallel",
        "rope_parameters": rope_parameters(rotary_of(config), partial=True),
    }


CONVERTER = register(
    Converter(
        model_type="stablelm",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("StableLm", spans=None),
        components=COMPONENTS,
        unread=("hidden_act", "rope_parameters"),
    )
)
