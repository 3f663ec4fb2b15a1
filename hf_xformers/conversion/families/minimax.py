# SPDX-License-Identifier: Apache-2.0
"""MiniMax-Text-01: `minimax` -> `xformer`. Lightning attention and softmax attention, with experts in every layer.

A sublayer adds to what its norm gives, which is a post-norm model with a norm on the embedding: the first norm of a
layer is here that of the sublayer before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Operation, Rule, copied, joined_by_group
from . import expert_layers, llama
from .qwen3_next import by_kind, kinds

LINEAR = "lightning_attention"
STREAM = tuple(f"{part}_alpha_factor" for part in ("full_attn", "linear_attn", "mlp"))
BRANCH = tuple(f"{part}_beta_factor" for part in ("full_attn", "linear_attn", "mlp"))
TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def decays(block: int) -> Operation:
    """Their tables of powers of decays, for blocks of this size, and our log decays."""

    def tables(tensors: list[Tensor]) -> list[Tensor]:
        slopes, steps = -tensors[0][:, None, None], torch.arange(1, block + 1, device=tensors[0].device)
        apart = steps[:, None] - steps[None, :]
        pairs = torch.where(apart >= 0, -(slopes * apart[None, None]), float("-inf"))
        return [slopes, (-slopes * steps[:, None]).exp(), (-slopes * (block - steps[:, None])).exp(), pairs.exp()]

    return Operation("tables of decays", lambda tensors: [-tensors[0].flatten()], tables)


def linear_rules(index: int, view: XFormerConfig) -> tuple[Rule, ...]:
    own, ours, width = f"@layers.{index}.self_attn", f"@trunk.layers.{index}.attention", view.head_width
    return (
        joined_by_group(
            f"{own}.qkv_proj.weight",
            tuple(f"{ours}.{x}_proj.weight" for x in "qkv"),
            view.num_attention_heads,
            (width,) * 3,
            "fused query, key and value of each head",
        ),
        copied(f"{own}.output_gate.weight", f"{ours}.gate_proj.weight"),
        copied(f"{own}.norm.weight", f"{ours}.output_norm.weight"),
        copied(f"{own}.out_proj.weight", f"{ours}.o_proj.weight"),
        Rule(
            tuple(f"{own}.{name}" for name in TABLES),
            (f"{ours}.decay.log_decay",),
            decays(view.attention.chunk_size),
        ),
    )


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    rules = [
        copied("@embed_tokens.weight", "@trunk.embedding.tokens.weight"),
        copied("@layers.0.input_layernorm.weight", "@trunk.embedding.norm.weight"),
        copied("@layers.{i}.post_attention_layernorm.weight", "@trunk.layers.{i}.attention_residual.norm.weight"),
    ]
    for index in range(config.num_hidden_layers):
        own, ours, view = f"@layers.{index}.self_attn", f"@trunk.layers.{index}", config.layer(index)
        after = "norm" if index + 1 == config.num_hidden_layers else f"layers.{index + 1}.input_layernorm"
        rules.append(copied(f"@{after}.weight", f"{ours}.feedforward_residual.norm.weight"))
        if view.attention.type == LINEAR:
            rules += linear_rules(index, view)
        else:
            rules += [copied(f"{own}.{x}_proj.weight", f"{ours}.attention.{x}_proj.weight") for x in "qkvo"]
    return (*rules, *expert_layers.rules(config))


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    """Our fields.

    Raises:
        ValueError: a window, another activation than SiLU, which lightning attention has, a type of layer that does
            not convert, or sublayers with different factors.
    """
    llama.refuse_other(config, sliding_window=None, **dict.fromkeys(BRANCH, 1))
    factors = {name: getattr(config, name) for name in STREAM}
    if len({*factors.values()}) > 1:
        given = ", ".join(f"{name}={value!r}" for name, value in factors.items())
        raise ValueError(f"{given} do not convert: one factor is that of all sublayers.")
    linear = {"type": LINEAR, "key_heads": config.num_attention_heads, "chunk_size": config.block_size}
    return {
        **llama.DECODER,
        **llama.by_layer(by_kind(config, {"type": "dense", "bias": False}, linear)),
        "head_dim": llama.own_width(config),
        "embedding": {"type": "token", "normalize": True},
        "residual": {"type": "post_ln", "stream_scale": llama.factor_of(config, "mlp_alpha_factor")},
        "feedforward": expert_layers.experts(config),
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    _, linear, names = kinds(config, LINEAR)
    return {
        **llama.width_beside(config),
        **expert_layers.count_fields(config),
        **dict.fromkeys(STREAM, config.residual.stream_scale),
        **({} if linear is None else {"block_size": linear.chunk_size}),
        "num_key_value_heads": config.key_value_heads,
        "layer_types": names,
        "rope_parameters": rope_parameters(rotary_of(config)),
    }


CONVERTER = register(
    Converter(
        model_type="minimax",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**llama.GROUPS, "backbone": backbone},
        heads=decoder_heads("MiniMax"),
        components={
            **llama.COMPONENTS,
            "attention": ("dense", LINEAR),
            "feedforward": (expert_layers.TYPE,),
            "residual": ("post_ln",),
        },
        per_layer=True,
        training_only=(*expert_layers.TRAINING, "router_jitter_noise"),
        unread=("rope_parameters", "head_dim"),  # None is the usual width
    )
)
