# SPDX-License-Identifier: Apache-2.0
"""RoFormer: `roformer` <-> `xf_roformer`.

transformers keeps the sines and cosines as a frozen table; ours computes them, for any length. Its classifier for
several choices reads the last place of a row, ours the last token that the attention mask keeps: they agree where rows
are not padded on the right. With `rotary_value` it counts padding on the left as positions and ours does not.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, computed, copied, sinusoids
from .bert import DENSE_CLASSIFIERS, FIELDS, LANGUAGE_HEAD, LAYERS


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    summary = {
        "summary_type": ("last",),
        "summary_use_proj": (False, None),
        "summary_activation": (None,),
    }
    for name, plain in summary.items():
        value = getattr(config, name, plain[0])
        if value not in plain:
            raise ValueError(f"A 'roformer' model with {name}={value!r} does not convert; only {plain[0]!r} does.")
    narrow = config.embedding_size != config.hidden_size
    return {
        "embedding": {"type": "factorized", "width": config.embedding_size}
        if narrow
        else {"type": "token", "normalize": True},
        "position": {"type": "rotary", "layout": "interleaved", "values": config.rotary_value},
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
        "pooler_activation": activation_name(config.hidden_act),  # of the classifier's hidden layer
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation(config.feedforward)[0],
        "embedding_size": getattr(config.embedding, "width", config.hidden_size),
        "rotary_value": getattr(config.position, "values", False),
    }


def _positions(config: XFormerConfig) -> tuple[Rule, ...]:
    rows, width = config.max_position_embeddings, config.head_width
    return (computed("@encoder.embed_positions.weight", lambda: sinusoids(rows, width, "half"), "sines and cosines"),)


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    projected = (copied("@embeddings_project.*", "@trunk.embedding.proj.*"),)
    return (
        copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        copied("@embeddings.token_type_embeddings.weight", "@trunk.embedding.types.weight"),
        copied("@embeddings.LayerNorm.*", "@trunk.embedding.norm.*"),
        *(projected if config.embedding.type == "factorized" else ()),
        *LAYERS,
    )


BASE = ("backbone", "positions")

CONVERTER = register(
    Converter(
        model_type="roformer",
        variant="xf_roformer",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine != "classifier_dropout"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "positions": _positions,
            **LANGUAGE_HEAD,
            **DENSE_CLASSIFIERS,
        },
        heads=(
            Head("RoFormerModel", "Model", "", BASE),
            Head("RoFormerForMaskedLM", "ForMaskedLM", "roformer.", (*BASE, "projection", "mlm"), causal=False),
            Head("RoFormerForCausalLM", "ForCausalLM", "roformer.", (*BASE, "projection", "mlm"), causal=True),
            Head(
                "RoFormerForSequenceClassification",
                "ForSequenceClassification",
                "roformer.",
                (*BASE, "sequence_pooler", "sequence"),
                settings={"add_pooler": True},
            ),
            Head("RoFormerForTokenClassification", "ForTokenClassification", "roformer.", (*BASE, "token")),
            Head("RoFormerForQuestionAnswering", "ForQuestionAnswering", "roformer.", (*BASE, "spans")),
            Head(
                "RoFormerForMultipleChoice",
                "ForMultipleChoice",
                "roformer.",
                (*BASE, "choice"),
                settings={"add_pooler": False, "classifier_pooling": "last"},
            ),
        ),
        unread=("hidden_act",),
    )
)
