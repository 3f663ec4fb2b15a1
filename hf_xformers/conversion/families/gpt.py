# SPDX-License-Identifier: Apache-2.0
"""GPT: `openai-gpt` <-> `xf_gpt`. Positions and padding as for GPT-2."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import copied
from .gpt2 import BLOCKS, FIELDS, LANGUAGE_MODEL, SEQUENCE, SUMMARY, SUMMARY_HEAD

# This family's own names; "gelu" is the tanh form here.
_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if config.afn not in _ACTIVATIONS:
        raise ValueError(f"Unknown activation afn={config.afn!r} of an 'openai-gpt' model.")
    return {"intermediate_size": 4 * config.n_embd, "feedforward": feedforward(_ACTIVATIONS[config.afn])}


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    name = activation(config.feedforward)[0]
    known = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs != "swish"}
    if name not in known:
        raise ValueError(f"An 'openai-gpt' model has no activation {name!r}; it has {', '.join(known)}.")
    return {"afn": known[name]}


CONVERTER = register(
    Converter(
        model_type="openai-gpt",
        variant="xf_gpt",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": (
                copied("@tokens_embed.weight", "@trunk.embedding.tokens.weight"),
                copied("@positions_embed.weight", "@trunk.position.table.weight"),
                *BLOCKS,
            ),
            "lm": LANGUAGE_MODEL,
            "summary": SUMMARY_HEAD,
            "sequence": SEQUENCE,
        },
        heads=(
            Head("OpenAIGPTModel", "Model", "", ("backbone",)),
            Head("OpenAIGPTLMHeadModel", "ForCausalLM", "transformer.", ("backbone", "lm")),
            Head("OpenAIGPTDoubleHeadsModel", "ForCausalLM", "transformer.", ("backbone", "lm", "summary")),
            Head(
                "OpenAIGPTForSequenceClassification",
                "ForSequenceClassification",
                "transformer.",
                ("backbone", "sequence"),
                pooling="last",
            ),
        ),
        unread=(*SUMMARY, "afn"),
        training_only=("embd_pdrop",),
    )
)
