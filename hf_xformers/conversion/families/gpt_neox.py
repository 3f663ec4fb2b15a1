# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX and Pythia: `gpt_neox` <-> a free mix with parallel sublayers (`xformer`).

Without `position_ids`, transformers counts padding on the left as positions; rotary scores depend on distances alone,
so that outputs agree all the same, but for the rotary types that go by the length of a text (see `llama`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, decoder_heads, register
from ..rotary import rope_parameters, rotary_of, rotation_fields
from ..rules import Rule, copied, fused_by_head, only_theirs
from .gpt_neo import TASKS

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "classifier_dropout",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
}


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    theirs, ours = "@layers.{i}", "@trunk.layers.{i}"
    suffixes = ("weight", "bias") if config.attention.bias else ("weight",)
    projections = [f"{ours}.attention.{name}_proj" for name in "qkv"]
    attention = [
        rule
        for suffix in suffixes
        for rule in (
            fused_by_head(
                f"{theirs}.attention.query_key_value.{suffix}",
                *(f"{projection}.{suffix}" for projection in projections),
                groups=config.num_attention_heads,
            ),
            copied(f"{theirs}.attention.dense.{suffix}", f"{ours}.attention.o_proj.{suffix}"),
        )
    ]
    return (
        copied("@embed_in.weight", "@trunk.embedding.tokens.weight"),
        copied(f"{theirs}.input_layernorm.*", f"{ours}.attention_residual.norm.*"),
        *attention,
        copied(f"{theirs}.post_attention_layernorm.*", f"{ours}.feedforward_residual.norm.*"),
        copied(f"{theirs}.mlp.dense_h_to_4h.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{theirs}.mlp.dense_4h_to_h.*", f"{ours}.feedforward.down_proj.*"),
        copied("@final_layer_norm.*", "@trunk.final_norm.*"),
    )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "is_decoder": True,
        "position": {"type": "rotary", **rotation_fields(config.rope_parameters, partial=True)},
        "attention": {"type": "dense", "bias": config.attention_bias},
        "block": "parallel" if config.use_parallel_residual else "vanilla",
        "residual": "pre_ln",
        "feedforward": feedforward(config.hidden_act),
        "head": "linear",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "rope_parameters": rope_parameters(rotary_of(config), partial=True),
        "attention_bias": config.attention.bias,
        "use_parallel_residual": config.block.type == "parallel",
        "hidden_act": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="gpt_neox",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),),
            "stored": (only_theirs("embed_out.weight"),),  # what files call it, which other classes do not read
            **TASKS,
        },
        heads=decoder_heads("GPTNeoX", "gpt_neox."),
        # Its models are causal whatever `is_decoder` says. `rope_parameters` may leave defaults out, or say them; what
        # they mean is compared as our position.
        unread=("hidden_act", "is_decoder", "rope_parameters"),
        native=False,
        components={
            "position": ("rotary",),
            "attention": ("dense",),
            "residual": ("pre_ln",),
            "block": ("parallel", "vanilla"),
        },
    )
)
