# SPDX-License-Identifier: Apache-2.0
"""ERNIE-M: `ernie_m` -> `xf_bert` without token types; one way, since transformers has no class for it any more.

Positions count from the third row of their table. Without `attention_mask` its class in transformers 4 hid padding
tokens; ours is to be given the mask. The head that extracts spans of several kinds has no counterpart.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..layouts.ernie_m import CLASSES
from ..rules import copied, only_theirs
from . import bert

OFFSET = 2
FIELDS = {
    mine: theirs for mine, theirs in bert.FIELDS.items() if mine not in ("max_position_embeddings", "type_vocab_size")
}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    bert.refuse_relative_positions(config)
    act = config.act_dropout
    return {
        "max_position_embeddings": config.max_position_embeddings - OFFSET,
        "type_vocab_size": 0,
        "position": {"type": "learned_absolute", "offset": OFFSET},
        "activation_dropout_prob": config.hidden_dropout_prob if act is None else act,
        "add_pooler": True,
        "feedforward": feedforward(config.hidden_act),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.max_position_embeddings + OFFSET,
        "act_dropout": config.activation_dropout_prob,
        "hidden_act": activation(config.feedforward)[0],
    }


_LAYER, _OURS = "@encoder.layers.{i}", "@trunk.layers.{i}"
BACKBONE = (
    copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
    copied("@embeddings.position_embeddings.weight", "@trunk.position.table.weight"),
    copied("@embeddings.layer_norm.*", "@trunk.embedding.norm.*"),
    *(copied(f"{_LAYER}.self_attn.self_attn.{x}_proj.*", f"{_OURS}.attention.{x}_proj.*") for x in "qkv"),
    copied(f"{_LAYER}.self_attn.out_proj.*", f"{_OURS}.attention.o_proj.*"),
    copied(f"{_LAYER}.norm1.*", f"{_OURS}.attention_residual.norm.*"),
    copied(f"{_LAYER}.linear1.*", f"{_OURS}.feedforward.up_proj.*"),
    copied(f"{_LAYER}.linear2.*", f"{_OURS}.feedforward.down_proj.*"),
    copied(f"{_LAYER}.norm2.*", f"{_OURS}.feedforward_residual.norm.*"),
)
_POOLED, _BARE, _PREFIX = ("backbone", "pooler"), ("backbone",), "ernie_m."

CONVERTER = register(
    Converter(
        model_type="ernie_m",
        variant="xf_bert",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "pooler": bert.POOLER,
            **bert.CLASSIFIERS,
            "extraction": (only_theirs("linear_start.*", "linear_end.*"),),
        },
        heads=(
            Head("ErnieMModel", "Model", "", _POOLED),
            Head("ErnieMForSequenceClassification", "ForSequenceClassification", _PREFIX, (*_POOLED, "sequence")),
            Head("ErnieMForTokenClassification", "ForTokenClassification", _PREFIX, (*_BARE, "token")),
            Head("ErnieMForQuestionAnswering", "ForQuestionAnswering", _PREFIX, (*_BARE, "spans")),
            Head("ErnieMForMultipleChoice", "ForMultipleChoice", _PREFIX, (*_POOLED, "choice")),
            Head("ErnieMForInformationExtraction", "Model", _PREFIX, (*_POOLED, "extraction")),
        ),
        unread=("hidden_act", "act_dropout"),  # `None` there is the rate of the states
        native=False,
        layouts=CLASSES,
    )
)
