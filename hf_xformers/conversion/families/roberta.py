# SPDX-License-Identifier: Apache-2.0
"""RoBERTa: `roberta` <-> `xf_roberta`.

transformers numbers positions from `pad_token_id + 1` and counts the tokens that are not the padding token; ours
counts those that the attention mask keeps. The two agree whenever the mask says what the padding is, and
`position_ids` mean the same.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from .bert import BACKBONE, DENSE_CLASSIFIERS, FIELDS, POOLER, language_head, refuse_relative_positions


def _offset(config: PreTrainedConfig) -> int:
    """Rows of the position table before the first token's."""
    if config.pad_token_id is None:
        raise ValueError("A 'roberta' model numbers its positions from `pad_token_id`; set it in the config.")
    return config.pad_token_id + 1


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    refuse_relative_positions(config)
    offset = _offset(config)
    return {
        "add_pooler": True,
        "max_position_embeddings": config.max_position_embeddings - offset,
        "first_position": offset,
        "position": {"type": "learned_absolute", "offset": offset},
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": "gelu"},  # whatever `hidden_act` says
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation(config.feedforward)[0],
        "max_position_embeddings": config.max_position_embeddings + _offset(config),
    }


LANGUAGE_HEAD = language_head("lm_head", "dense", "layer_norm")

CONVERTER = register(
    Converter(
        model_type="roberta",
        variant="xf_roberta",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine != "max_position_embeddings"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "pooler": POOLER,
            **LANGUAGE_HEAD,
            **DENSE_CLASSIFIERS,
        },
        heads=(
            Head("RobertaModel", "Model", "", ("backbone", "pooler")),
            Head("RobertaForMaskedLM", "ForMaskedLM", "roberta.", ("backbone", "projection", "mlm"), causal=False),
            Head("RobertaForCausalLM", "ForCausalLM", "roberta.", ("backbone", "projection", "mlm"), causal=True),
            Head(
                "RobertaForSequenceClassification",
                "ForSequenceClassification",
                "roberta.",
                ("backbone", "sequence_pooler", "sequence"),
            ),
            Head("RobertaForTokenClassification", "ForTokenClassification", "roberta.", ("backbone", "token")),
            Head("RobertaForQuestionAnswering", "ForQuestionAnswering", "roberta.", ("backbone", "spans")),
            Head("RobertaForMultipleChoice", "ForMultipleChoice", "roberta.", ("backbone", "pooler", "choice")),
        ),
        unread=("hidden_act",),
    )
)
