# SPDX-License-Identifier: Apache-2.0
"""Llama: `llama` -> `xformer`; and what its many relatives share.

Without `position_ids`, transformers counts padding on the left as positions and ours does not; rotary scores depend on
distances alone, so that the two agree. Under `rope_type` "dynamic" or "longrope" it stretches all rows of a batch by
the longest of them; ours each by its own length: they agree where rows are of one length, or short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Groups, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied, zero

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "rms_norm_eps",
}
COMPONENTS = {
    "embedding": ("token",),
    "position": ("rotary",),
    "attention": ("dense",),
    "normalization": ("rms_norm",),
    "residual": ("pre_ln",),
    "block": ("vanilla",),
    "stack": ("plain",),
    "head": ("linear",),
}
# What all of these models are, whatever their config says.
DECODER: dict[str, Any] = {
    "is_decoder": True,
    "type_vocab_size": 0,
    "hidden_dropout_prob": 0.0,
    "embedding": "token",
    "normalization": "rms_norm",
    "residual": "pre_ln",
    "head": "linear",
}


def linear(theirs: str, ours: str, bias: bool) -> Rule:
    """A projection with or without bias."""
    return copied(f"{theirs}.*", f"{ours}.*") if bias else copied(f"{theirs}.weight", f"{ours}.weight")


def attention_rules(config: XFormerConfig, output: str = "o_proj") -> tuple[Rule, ...]:
    """Projections of attention, in all layers. output: their name of the last one."""
    attention, own, ours = config.layer(0).attention, "@layers.{i}.self_attn", "@trunk.layers.{i}.attention"
    return (
        *(linear(f"{own}.{x}_proj", f"{ours}.{x}_proj", attention.bias) for x in "qkv"),
        linear(f"{own}.{output}", f"{ours}.o_proj", attention.has_output_bias),
    )


def network_rules(config: XFormerConfig, layer: str = "{i}", **names: str) -> tuple[Rule, ...]:
    """Projections of the feed-forward network, in all layers or in one. names: theirs by ours, where they are not
    Llama's."""
    names = names or {x: f"{x}_proj" for x in ("gate", "up", "down")}
    own, ours, bias = f"@layers.{layer}.mlp", f"@trunk.layers.{layer}.feedforward", config.feedforward.bias
    return tuple(linear(f"{own}.{theirs}", f"{ours}.{x}_proj", bias) for x, theirs in names.items())


def projections(config: XFormerConfig) -> tuple[Rule, ...]:
    """Of attention and of the gated feed-forward network, in all layers."""
    return (*attention_rules(config), *network_rules(config))


def frame(config: XFormerConfig, last: str = "norm") -> tuple[Rule, ...]:
    """The token table and norms, with biases where they have them; one of a layer where its sublayers share it. last:
    their name of the final one."""
    own, ours = "@layers.{i}", "@trunk.layers.{i}"
    bias = getattr(config.normalization, "bias", False)
    norms = {"input_layernorm": "attention_residual", "post_attention_layernorm": "feedforward_residual"}
    if getattr(config.block, "shared_norm", False):
        del norms["post_attention_layernorm"]
    return (
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        *(linear(f"{own}.{theirs}", f"{ours}.{residual}.norm", bias) for theirs, residual in norms.items()),
        linear(f"@{last}", "@trunk.final_norm", bias),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    return (*projections(config), *frame(config))


GROUPS: dict[str, Groups] = {
    "backbone": backbone,
    "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),),
    "sequence": (copied("score.weight", "classifier.weight"), zero("classifier.bias")),
    "token": (copied("score.*", "classifier.*"),),
    "spans": (copied("qa_outputs.*", "classifier.*"),),
}


def by_layer(
    attentions: list[dict[str, Any]], feedforwards: list[dict[str, Any]] | None = None, **further: list[Any]
) -> dict[str, Any]:
    """Our fields for layers with these attentions, these feed-forward components, and further ones by slot: the first
    layer's for all, and those that differ."""
    slots = {"attention": attentions, **({} if feedforwards is None else {"feedforward": feedforwards}), **further}
    others: dict[int, dict[str, Any]] = {}
    for slot, entries in slots.items():
        for index, entry in enumerate(entries):
            if entry != entries[0]:
                others.setdefault(index, {})[slot] = entry
    return {slot: entries[0] for slot, entries in slots.items()} | ({"per_layer_config": others} if others else {})


def refuse_other(config: PreTrainedConfig, **plain: Any) -> None:
    """Raises `ValueError` for a field of theirs that is not what converts."""
    for name, value in plain.items():
        found = getattr(config, name, value)
        if found != value:
            raise ValueError(f"{name}={found!r} does not convert; only {value!r} does.")


def head_width(config: XFormerConfig) -> dict[str, int]:
    return {"head_dim": config.head_width, "num_key_value_heads": config.key_value_heads}


def own_width(config: PreTrainedConfig) -> int:
    """Of a head, where their config has no field for it and their model reads one that is there."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def width_beside(config: XFormerConfig) -> dict[str, int]:
    """The counterpart of [`own_width`]."""
    usual = config.hidden_size == config.head_width * config.num_attention_heads
    return {} if usual else {"head_dim": config.head_width}


def factor_of(config: PreTrainedConfig, name: str) -> float:
    """A factor of their config.

    Raises:
        ValueError: it is not positive.
    """
    value = getattr(config, name)
    if value is None or not value > 0:
        raise ValueError(f"{name}={value!r} does not convert: factors here are positive.")
    return float(value)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    refuse_other(config, pretraining_tp=1)
    return {
        **DECODER,
        "head_dim": config.head_dim,
        "attention": {"type": "dense", "bias": config.attention_bias},
        "feedforward": feedforward(config.hidden_act, gated=True, bias=config.mlp_bias),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        **head_width(config),
        **gated_activation(config, "hidden_act"),
        "attention_bias": config.attention.bias,
        "mlp_bias": config.feedforward.bias,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


def gated_activation(config: XFormerConfig, name: str) -> Mapping[str, str]:
    """Their field `name` for a gated feed-forward component.

    Raises:
        ValueError: it has no gate.
    """
    found, gated = activation(config.feedforward)
    if not gated:
        raise ValueError(
            f"feedforward {config.feedforward.type!r} has no counterpart in transformers: this model's is gated, as"
            " 'swiglu' is."
        )
    return {name: found}


CONVERTER = register(
    Converter(
        model_type="llama",
        variant="xformer",
        native=False,
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=GROUPS,
        heads=decoder_heads("Llama", spans="transformer."),
        components=COMPONENTS,
        # `rope_parameters` may leave defaults out, or say them; what they mean is compared as our position
        unread=("hidden_act", "pretraining_tp", "rope_parameters"),
    )
)
