# SPDX-License-Identifier: Apache-2.0
"""Falcon: `falcon` <-> a free mix with rotary positions and, mostly, parallel sublayers (`xformer`).

Their config has several ways to say the same (`new_decoder_architecture` with one norm, and without it); a model comes
back in the older one where that can say it. Without `position_ids`, transformers counts padding on the left as
positions; rotary scores depend on distances alone, so that outputs agree all the same. With `alibi` it rounds slopes
and products to bfloat16 whatever the type of the model is, which ours does not: refused.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied, fused_by_head
from .gpt_neo import TASKS

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    theirs, ours = "@h.{i}", "@trunk.layers.{i}"
    suffix = "*" if config.attention.bias else "weight"
    groups = config.key_value_heads
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.block.type == "parallel":
        names = ["input_layernorm"] if config.block.shared_norm else ["ln_attn", "ln_mlp"]
    norms = zip(names, ("attention_residual", "feedforward_residual"))
    return (
        copied("@word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        *(copied(f"{theirs}.{name}.*", f"{ours}.{frame}.norm.*") for name, frame in norms),
        fused_by_head(
            f"{theirs}.self_attention.query_key_value.{suffix}",
            *(f"{ours}.attention.{name}_proj.{suffix}" for name in "qkv"),
            groups=groups,
            queries=config.num_attention_heads // groups,
        ),
        copied(f"{theirs}.self_attention.dense.{suffix}", f"{ours}.attention.o_proj.{suffix}"),
        copied(f"{theirs}.mlp.dense_h_to_4h.{suffix}", f"{ours}.feedforward.up_proj.{suffix}"),
        copied(f"{theirs}.mlp.dense_4h_to_h.{suffix}", f"{ours}.feedforward.down_proj.{suffix}"),
        copied("@ln_f.*", "@trunk.final_norm.*"),
    )


def _check(config: PreTrainedConfig) -> None:
    """What their config says and their model has no modules for, or ours has not."""
    new, norms = config.new_decoder_architecture, config.num_ln_in_parallel_attn
    wrong = [
        (config.alibi, "alibi=True", "transformers rounds its biases to bfloat16, and ours are exact"),
        (new and not config.parallel_attn, "parallel_attn=False", "`new_decoder_architecture` is parallel"),
        (
            norms not in (None, 1, 2) or (norms == 2 and not new),
            f"num_ln_in_parallel_attn={norms!r}",
            "it is 1, or with `new_decoder_architecture` 2",
        ),
    ]
    for found, what, why in wrong:
        if found:
            raise ValueError(f"A 'falcon' model with {what} does not convert: {why}.")


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    _check(config)
    heads = config.num_attention_heads
    if config.new_decoder_architecture:
        groups, block = config.num_kv_heads, {"type": "parallel", "shared_norm": config.num_ln_in_parallel_attn == 1}
    else:
        groups = 1 if config.multi_query else heads
        block = {"type": "parallel", "shared_norm": True} if config.parallel_attn else {"type": "vanilla"}
    return {
        "is_decoder": True,
        "num_key_value_heads": None if groups == heads else groups,
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters)},
        "attention": {"type": "dense", "bias": config.bias},
        "block": block,
        "residual": "pre_ln",
        "feedforward": feedforward(config.activation, bias=config.bias),
        "head": "linear",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    heads, groups, parallel = config.num_attention_heads, config.key_value_heads, config.block.type == "parallel"
    shared = parallel and config.block.shared_norm
    new = parallel and (not shared or groups not in (1, heads))
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (1 if shared else 2) if new else None,
        "parallel_attn": parallel,
        "multi_query": new or groups == 1,
        "num_kv_heads": groups if new else heads,
        "rope_parameters": rope_parameters(rotary_of(config)),
        "bias": config.attention.bias,
        "activation": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="falcon",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={"backbone": _backbone, "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),), **TASKS},
        heads=decoder_heads("Falcon", "transformer."),
        # `to_ours` reads these together; what they come to is compared as heads, block and position
        unread=(
            "rope_parameters",
            "new_decoder_architecture",
            "num_ln_in_parallel_attn",
            "num_kv_heads",
            "multi_query",
            "activation",
        ),
        native=False,
        components={
            "position": ("rotary",),
            "attention": ("dense",),
            "residual": ("pre_ln",),
            "block": ("parallel", "vanilla"),
        },
    )
)
