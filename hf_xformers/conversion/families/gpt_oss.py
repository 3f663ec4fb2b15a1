# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS: `gpt_oss` -> `xformer`. Layers that read all tokens or a sliding window, with learned sinks, and experts
with biases whose gates are clamped."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ...position.rotary import RotarySpec
from ...position.rotary_scaling import YarnScaling
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Operation, Rule, Tensors, copied
from . import expert_layers, llama
from .mistral import COMPONENTS
from .qwen2 import layer_types, layers


def _apart(tensors: Tensors) -> Tensors:
    """Rows of the gate and of what it gates by turns, [E, 2 F, ...], one after the other."""
    return [tensors[0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()]


def _by_turns(tensors: Tensors) -> Tensors:
    return [tensors[0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()]


def _turned(tensors: Tensors) -> Tensors:
    """[E, in, out] and [E, out, in]."""
    return [tensors[0].transpose(1, 2).contiguous()]


APART = Operation("rows apart", _apart, _by_turns)
TURNED = Operation("transposed", _turned, _turned, plain=True)
TURNED_APART = Operation("rows apart", lambda t: _apart(_turned(t)), lambda t: _turned(_by_turns(t)))


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    own, ours = "@layers.{i}", "@trunk.layers.{i}"
    experts, mine = f"{own}.mlp.experts", f"{ours}.feedforward.experts"
    return (
        *llama.attention_rules(config),
        copied(f"{own}.self_attn.sinks", f"{ours}.attention.sinks"),
        copied(f"{own}.mlp.router.*", f"{ours}.feedforward.router.*"),
        Rule((f"{experts}.gate_up_proj",), (f"{mine}.gate_up_proj",), TURNED_APART),
        Rule((f"{experts}.gate_up_proj_bias",), (f"{mine}.gate_up_bias",), APART),
        Rule((f"{experts}.down_proj",), (f"{mine}.down_proj",), TURNED),
        copied(f"{experts}.down_proj_bias", f"{mine}.down_bias"),
        *llama.frame(config),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.DECODER,
        **layers(config, {"bias": config.attention_bias, "learned_sinks": True}),
        "head_dim": config.head_dim,
        "feedforward": expert_layers.experts(
            config,
            activation="silu",  # which `limit` and `alpha` take the place of
            bias=True,
            router_bias=True,
            limit=config.swiglu_limit,
            alpha=config.swiglu_alpha,
        ),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def rotation(spec: RotarySpec) -> dict[str, Any]:
    """Their `rope_parameters`, which name what YaRN does by default, too."""
    found, scaling = rope_parameters(spec), spec.scaling
    if not isinstance(scaling, YarnScaling):
        return found
    names = ("beta_fast", "beta_slow", "truncate")
    return {**{name: getattr(scaling, name) for name in names}, **found}


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec, (kinds, window) = expert_layers.experts_of(config), layer_types(config)
    return {
        **llama.head_width(config),
        **expert_layers.count_fields(config),
        **({} if spec.limit is None else {"swiglu_limit": spec.limit}),
        "swiglu_alpha": spec.alpha,
        "attention_bias": config.layer(0).attention.bias,
        "layer_types": kinds,
        **({} if window is None else {"sliding_window": window}),
        "rope_parameters": rotation(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="gpt_oss",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("GptOss", spans=None),
        components={**COMPONENTS, "feedforward": (expert_layers.TYPE,)},
        per_layer=True,
        training_only=expert_layers.TRAINING,
        # an activation that their experts have no place for, and the size of windows where no layer has one
        unread=("hidden_act", "rope_parameters", "sliding_window"),
    )
)
