# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: `qwen3_next` -> `xformer`. Gated delta networks in most layers and gated attention in the others, with
experts and a gated network that all tokens share."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Operation, Rule, copied, joined_by_group
from . import expert_layers, llama
from .qwen2 import FIELDS

LAYER_TYPES = ("full_attention", "linear_attention")
LINEAR = "gated_delta_net"
TAPS = Operation("squeezed", lambda t: [t[0].squeeze(1)], lambda t: [t[0].unsqueeze(1)], plain=True)
# What each of their fields for linear layers is here.
WIDTHS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_width": "linear_key_head_dim",
    "value_width": "linear_value_head_dim",
    "conv": "linear_conv_kernel_dim",
}


def linear_rules(index: int, view: XFormerConfig) -> tuple[Rule, ...]:
    """Of a layer with a state that decays."""
    own, ours, spec = f"@layers.{index}.linear_attn", f"@trunk.layers.{index}.attention", view.attention
    shared = spec.value_heads // spec.key_heads
    values = shared * spec.value_width
    return (
        joined_by_group(
            f"{own}.in_proj_qkvz.weight",
            tuple(f"{ours}.{x}_proj.weight" for x in ("q", "k", "v", "gate")),
            spec.key_heads,
            (spec.key_width, spec.key_width, values, values),
            "fused query, key, value and gate of each head",
        ),
        joined_by_group(
            f"{own}.in_proj_ba.weight",
            (f"{ours}.beta_proj.weight", f"{ours}.decay_proj.weight"),
            spec.key_heads,
            (shared, shared),
            "fused strength and decay of each head",
        ),
        *shared_linear_rules(own, ours),
    )


def shared_linear_rules(own: str, ours: str, norm: str = "norm", output: str = "out_proj") -> tuple[Rule, ...]:
    """Of what relatives have alike. norm, output: their names of the norm and the projection of what is read."""
    return (
        Rule((f"{own}.conv1d.weight",), (f"{ours}.short_conv.weight",), TAPS),
        copied(f"{own}.A_log", f"{ours}.decay.A_log"),
        copied(f"{own}.dt_bias", f"{ours}.decay.dt_bias"),
        copied(f"{own}.{norm}.weight", f"{ours}.output_norm.weight"),
        copied(f"{own}.{output}.weight", f"{ours}.o_proj.weight"),
    )


def full_rules(index: int, view: XFormerConfig) -> tuple[Rule, ...]:
    """Of a layer that reads all tokens, whose queries stand next to their gates."""
    own, ours, bias = f"@layers.{index}.self_attn", f"@trunk.layers.{index}.attention", view.attention.bias
    width = view.head_width
    return (
        *(
            joined_by_group(
                f"{own}.q_proj.{kind}",
                (f"{ours}.q_proj.{kind}", f"{ours}.gate_proj.{kind}"),
                view.num_attention_heads,
                (width, width),
                "fused query and gate of each head",
            )
            for kind in (("weight", "bias") if bias else ("weight",))
        ),
        *(llama.linear(f"{own}.{x}_proj", f"{ours}.{x}_proj", bias) for x in "kvo"),
        *(copied(f"{own}.{x}_norm.weight", f"{ours}.{x}_norm.weight") for x in "qk"),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for index in range(config.num_hidden_layers):
        view = config.layer(index)
        rules += (linear_rules if view.attention.type == LINEAR else full_rules)(index, view)
    return (*rules, *expert_layers.rules(config), *llama.frame(config))


def by_kind(config: PreTrainedConfig, full: dict[str, Any], linear: dict[str, Any]) -> list[dict[str, Any]]:
    """Our attention of every layer, of those that read all tokens and those with a state.

    Raises:
        ValueError: a type of layer that does not convert, or an activation other than SiLU, which a convolution has.
    """
    llama.refuse_other(config, hidden_act="silu")
    entries = dict(zip(LAYER_TYPES, (full, linear), strict=True))
    for kind in config.layer_types:
        if kind not in entries:
            raise ValueError(f"layer_types has {kind!r}, which does not convert; these do: {', '.join(LAYER_TYPES)}.")
    return [entries[kind] for kind in config.layer_types]


def kinds(config: XFormerConfig, linear: str = LINEAR) -> tuple[Any, Any, list[str]]:
    """The inverse of [`by_kind`]: the first attention that reads all tokens and the first of type `linear`, None where
    there is none, and their names of all layers."""
    specs = [config.layer(index).attention for index in range(config.num_hidden_layers)]
    found = [next((spec for spec in specs if (spec.type == linear) is wanted), None) for wanted in (False, True)]
    return found[0], found[1], [LAYER_TYPES[spec.type == linear] for spec in specs]


def linear_attention(config: PreTrainedConfig, **fields: Any) -> dict[str, Any]:
    """Ours of layers with a state."""
    return {"type": LINEAR, **{mine: getattr(config, theirs) for mine, theirs in WIDTHS.items()}, **fields}


def linear_fields(spec: Any) -> dict[str, Any]:
    """The inverse of [`linear_attention`]; none without such layers."""
    return {} if spec is None else {theirs: getattr(spec, mine) for mine, theirs in WIDTHS.items()}


def attentions(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Our attention of every layer."""
    full = {"type": "dense", "bias": config.attention_bias, "query_key_norm": "head", "output_gate": "element"}
    return by_kind(config, full, linear_attention(config))


def fields_of_attention(config: XFormerConfig) -> dict[str, Any]:
    """The inverse of [`attentions`]."""
    full, linear, names = kinds(config)
    return {
        **llama.head_width(config),
        **linear_fields(linear),
        **({} if full is None else {"attention_bias": full.bias}),
        "layer_types": names,
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    networks = expert_layers.networks(
        config,
        expert_layers.steps(config),
        normalize=config.norm_topk_prob,
        expert_size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    return {
        **llama.DECODER,
        **llama.by_layer(attentions(config), networks),
        "normalization": {"type": "rms_norm", "from_zero": True},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters, partial=True)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    spec = expert_layers.experts_of(config)
    return {
        **fields_of_attention(config),
        **expert_layers.count_fields(config),
        **expert_layers.step_fields(config),
        "norm_topk_prob": spec.normalize,
        "moe_intermediate_size": spec.expert_size or config.intermediate_size,
        "shared_expert_intermediate_size": spec.shared_size or config.intermediate_size,
        "rope_parameters": rope_parameters(rotary_of(config), partial=True),
    }


CONVERTER = register(
    Converter(
        model_type="qwen3_next",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("Qwen3Next", spans="transformer."),
        components={**llama.COMPONENTS, "attention": ("dense", LINEAR)},
        per_layer=True,
        training_only=expert_layers.TRAINING,
        # several steps may mean the same layers
        unread=("rope_parameters", "decoder_sparse_step", "mlp_only_layers"),
    )
)
