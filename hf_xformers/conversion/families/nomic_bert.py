# SPDX-License-Identifier: Apache-2.0
"""NomicBERT: `nomic_bert` <-> `xformer`, BERT with rotary positions and gated feed-forwards, without most biases.

The bare model has no pooler unless it is loaded with one, which is left behind.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import copied
from .bert import CLASSIFIERS, FIELDS, POOLER, language_head


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        raise ValueError(f"rope_type={kind!r} does not convert for 'nomic_bert'; only 'default' does.")
    own_width = config.head_dim * config.num_attention_heads != config.hidden_size
    return {
        "head_dim": config.head_dim if own_width else None,
        "add_pooler": True,
        "embedding": {"type": "token", "normalize": True},
        "position": {"type": "rotary", "theta": config.rope_parameters["rope_theta"]},
        "attention": {"type": "dense", "bias": False},
        "feedforward": feedforward(config.hidden_act, gated=True, bias=False),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    name, gated = activation(config.feedforward)
    if not gated:
        raise ValueError(
            f"feedforward {config.feedforward.type!r} has no counterpart in transformers: those of 'nomic_bert' models"
            " are gated."
        )
    return {
        "head_dim": config.head_width,
        "hidden_act": name,
        "rope_parameters": {"rope_type": "default", "rope_theta": getattr(config.position, "theta", 10000.0)},
    }


_ATTENTION = tuple(
    copied(f"@layers.{{i}}.self_attn.{name}_proj.weight", f"@trunk.layers.{{i}}.attention.{name}_proj.weight")
    for name in "qkvo"
)
_FEEDFORWARD = tuple(
    copied(f"@layers.{{i}}.mlp.{name}_proj.weight", f"@trunk.layers.{{i}}.feedforward.{name}_proj.weight")
    for name in ("gate", "up", "down")
)

CONVERTER = register(
    Converter(
        model_type="nomic_bert",
        variant="xformer",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine != "is_decoder"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": (
                copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
                copied("@embeddings.token_type_embeddings.weight", "@trunk.embedding.types.weight"),
                copied("@embeddings.LayerNorm.*", "@trunk.embedding.norm.*"),
                *_ATTENTION,
                copied("@layers.{i}.post_attention_layernorm.*", "@trunk.layers.{i}.attention_residual.norm.*"),
                *_FEEDFORWARD,
                copied("@layers.{i}.post_mlp_layernorm.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
            ),
            "pooler": POOLER,
            **language_head("cls.predictions", "transform.dense", "transform.layer_norm"),
            "sequence": CLASSIFIERS["sequence"],
            "token": CLASSIFIERS["token"],
        },
        heads=(
            Head("NomicBertModel", "Model", "", ("backbone",), settings={"add_pooler": False}),
            Head("NomicBertForMaskedLM", "ForMaskedLM", "nomic_bert.", ("backbone", "projection", "mlm")),
            Head(
                "NomicBertForSequenceClassification",
                "ForSequenceClassification",
                "nomic_bert.",
                ("backbone", "pooler", "sequence"),
            ),
            Head(
                "NomicBertForTokenClassification",
                "ForTokenClassification",
                "nomic_bert.",
                ("backbone", "token"),
            ),
        ),
        unread=("hidden_act",),
        native=False,
        components={
            "embedding": ("token",),
            "position": ("rotary",),
            "attention": ("dense",),
            "residual": ("post_ln",),
            "normalization": ("layer_norm",),
            "block": ("vanilla",),
            "stack": ("plain",),
            "head": ("transform",),
        },
    )
)
