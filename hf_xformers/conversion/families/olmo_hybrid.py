# SPDX-License-Identifier: Apache-2.0
"""OLMo Hybrid: `olmo_hybrid` -> `xformer`. Gated delta networks in most layers and full attention in the others, which
normalize what sublayers give, as OLMo 2 does; published ones know no positions."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied
from . import llama
from .qwen3_next import LINEAR, by_kind, kinds, linear_attention, linear_fields, shared_linear_rules

NORM_EPS = 1e-5  # of what linear layers give, whatever `rms_norm_eps` is
# Before which sublayer, or behind it, each of their norms stands.
NORMS = {
    "pre_ln": ("input_layernorm", "post_attention_layernorm"),
    "res_post_ln": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
PROJECTIONS = {"q": "q", "k": "k", "v": "v", "g": "gate", "a": "decay", "b": "beta"}


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    rules = [
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        copied("@norm.weight", "@trunk.final_norm.weight"),
    ]
    for index in range(config.num_hidden_layers):
        own, ours, view = f"@layers.{index}", f"@trunk.layers.{index}", config.layer(index)
        for norm, sublayer in zip(NORMS[view.residual.type], ("attention", "feedforward"), strict=True):
            rules.append(copied(f"{own}.{norm}.weight", f"{ours}.{sublayer}_residual.norm.weight"))
        if view.attention.type == LINEAR:
            own, ours = f"{own}.linear_attn", f"{ours}.attention"
            rules += [copied(f"{own}.{x}_proj.weight", f"{ours}.{y}_proj.weight") for x, y in PROJECTIONS.items()]
            rules += shared_linear_rules(own, ours, "o_norm", "o_proj")
        else:
            own, ours = f"{own}.self_attn", f"{ours}.attention"
            rules += [llama.linear(f"{own}.{x}_proj", f"{ours}.{x}_proj", view.attention.bias) for x in "qkvo"]
            rules += [copied(f"{own}.{x}_norm.weight", f"{ours}.{x}_norm.weight") for x in "qk"]
    return (*rules, *llama.network_rules(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    full = {"type": "dense", "bias": config.attention_bias, "query_key_norm": "projection"}
    linear = linear_attention(config, norm_eps=NORM_EPS, negative=config.linear_allow_neg_eigval)
    turns = (config.rope_parameters or {}).get("rope_theta") is not None
    return {
        **llama.DECODER,
        **llama.by_layer(
            by_kind(config, full, linear),
            residual=["res_post_ln" if kind == "full_attention" else "pre_ln" for kind in config.layer_types],
        ),
        "head_dim": llama.own_width(config),
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)} if turns else "none",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    full, linear, names = kinds(config)
    turns = config.position.type != "none"
    return {
        **llama.gated_activation(config, "hidden_act"),
        **llama.width_beside(config),
        **linear_fields(linear),
        "layer_types": names,
        "num_key_value_heads": config.key_value_heads,
        "attention_bias": full is not None and full.bias,
        "linear_allow_neg_eigval": linear is None or linear.negative,
        "rope_parameters": rope_parameters(rotary_of(config)) if turns else {"rope_theta": None},
    }


CONVERTER = register(
    Converter(
        model_type="olmo_hybrid",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("OlmoHybrid", sequence=False, token=False, spans=None),
        components={
            **llama.COMPONENTS,
            "attention": ("dense", LINEAR),
            "residual": tuple(NORMS),
            "position": ("rotary", "none"),
        },
        per_layer=True,
        # of fresh weights
        unread=(
            *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
            "rope_parameters",
        ),
    )
)
