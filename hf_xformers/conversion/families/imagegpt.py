# SPDX-License-Identifier: Apache-2.0
"""Image GPT: `imagegpt` <-> `xf_image_gpt`.

The last id starts an image and is never predicted. Classifiers read the mean of all tokens; ours leaves padding out of
it, which images have none of. Without `position_ids`, transformers counts padding on the left as positions and ours
does not.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import copied, fused, transposed
from .gpt2 import FIELDS, SEQUENCE

BACKBONE = (
    copied("@wte.weight", "@trunk.embedding.tokens.weight"),
    copied("@wpe.weight", "@trunk.position.table.weight"),
    copied("@h.{i}.ln_1.weight", "@trunk.layers.{i}.attention_residual.norm.weight"),
    fused("@h.{i}.attn.c_attn.*", *(f"@trunk.layers.{{i}}.attention.{name}_proj.*" for name in "qkv")),
    transposed("@h.{i}.attn.c_proj.*", "@trunk.layers.{i}.attention.o_proj.*"),
    copied("@h.{i}.ln_2.weight", "@trunk.layers.{i}.feedforward_residual.norm.weight"),
    transposed("@h.{i}.mlp.c_fc.*", "@trunk.layers.{i}.feedforward.up_proj.*"),
    transposed("@h.{i}.mlp.c_proj.*", "@trunk.layers.{i}.feedforward.down_proj.*"),
    copied("@ln_f.weight", "@trunk.final_norm.weight"),
)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if config.tie_word_embeddings:
        raise ValueError(
            "An 'imagegpt' model with tie_word_embeddings=True does not convert: its output has a row less than its"
            " token table."
        )
    return {
        "is_decoder": True,
        "intermediate_size": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "attention": {"type": "dense", "scale": None if config.scale_attn_weights else 1.0},
        "normalization": "rms_norm",
        "residual": "pre_ln",
        "feedforward": feedforward(config.activation_function),
        "head": {"type": "linear", "unpredicted": 1},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    inner = config.intermediate_size
    return {
        "n_inner": None if inner == 4 * config.hidden_size else inner,
        "scale_attn_weights": config.attention.scale is None,
        "activation_function": activation(config.feedforward)[0],
    }


CONVERTER = register(
    Converter(
        model_type="imagegpt",
        variant="xf_image_gpt",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "lm": (copied("lm_head.weight", "lm_head.decoder.weight"),),
            "sequence": SEQUENCE,
        },
        heads=(
            Head("ImageGPTModel", "Model", "", ("backbone",)),
            Head(
                "ImageGPTForCausalImageModeling",
                "ForCausalLM",
                "transformer.",
                ("backbone", "lm"),
                settings={"tie_word_embeddings": False},
            ),
            Head(
                "ImageGPTForImageClassification",
                "ForSequenceClassification",
                "transformer.",
                ("backbone", "sequence"),
                pooling="mean",
                settings={"classifier_pooling": "mean"},
            ),
        ),
        # `n_inner` may repeat the default; its value is checked as `intermediate_size`
        unread=("n_inner", "activation_function"),
        training_only=("embd_pdrop",),
        components={
            "position": ("learned_absolute",),
            "attention": ("dense",),
            "normalization": ("rms_norm",),
            "residual": ("pre_ln",),
            "block": ("vanilla",),
        },
    )
)
