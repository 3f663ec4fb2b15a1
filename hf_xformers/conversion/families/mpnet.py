# SPDX-License-Identifier: Apache-2.0
"""MPNet: `mpnet` <-> the free mix with learned absolute positions and T5's bias.

transformers numbers positions from 2 on and counts the tokens that are not token 1, whatever `pad_token_id` says; ours
counts those that the attention mask keeps. The two agree whenever token 1 is the padding and the mask says where it
is. It sorts distances into 32 buckets whatever `relative_attention_num_buckets` says.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, register
from ..rules import copied
from .bert import COMPONENTS, DENSE_CLASSIFIERS, FIELDS, POOLER
from .roberta import CONVERTER as ROBERTA
from .roberta import LANGUAGE_HEAD

_OFFSET = 2  # rows of the position table before the first token's
_PADDING = 1  # what is not counted


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if config.pad_token_id != _PADDING:
        raise ValueError(
            f"A 'mpnet' model with pad_token_id={config.pad_token_id!r} does not convert: transformers counts the"
            f" positions of tokens other than {_PADDING}, whatever the config says."
        )
    return {
        "add_pooler": True,
        "type_vocab_size": 0,
        "max_position_embeddings": config.max_position_embeddings - _OFFSET,
        "first_position": _OFFSET,
        "embedding": {"type": "token", "normalize": True},
        "position": {
            "type": "combined",
            "parts": (
                {"type": "learned_absolute", "offset": _OFFSET},
                {"type": "t5_relative_bias", "num_buckets": 32, "max_distance": 128},
            ),
        },
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": "gelu"},  # whatever `hidden_act` says
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    if config.pad_token_id != _PADDING:
        raise ValueError(
            f"pad_token_id={config.pad_token_id!r} has no counterpart: 'mpnet' models count positions by token"
            f" {_PADDING} as the padding; set it to that."
        )
    return {
        "hidden_act": activation(config.feedforward)[0],
        "max_position_embeddings": config.max_position_embeddings + _OFFSET,
    }


_LAYER, _OURS = "@encoder.layer.{i}", "@trunk.layers.{i}"
BACKBONE = (
    copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
    copied("@embeddings.position_embeddings.weight", "@trunk.position.parts.0.table.weight"),
    copied("@embeddings.LayerNorm.*", "@trunk.embedding.norm.*"),
    copied("@encoder.relative_attention_bias.weight", "@trunk.position.parts.1.table.weight"),
    *(copied(f"{_LAYER}.attention.attn.{name}.*", f"{_OURS}.attention.{name}_proj.*") for name in "qkvo"),
    copied(f"{_LAYER}.attention.LayerNorm.*", f"{_OURS}.attention_residual.norm.*"),
    copied(f"{_LAYER}.intermediate.dense.*", f"{_OURS}.feedforward.up_proj.*"),
    copied(f"{_LAYER}.output.dense.*", f"{_OURS}.feedforward.down_proj.*"),
    copied(f"{_LAYER}.output.LayerNorm.*", f"{_OURS}.feedforward_residual.norm.*"),
)
_ELSEWHERE = ("max_position_embeddings", "type_vocab_size", "classifier_dropout", "is_decoder")

CONVERTER = register(
    Converter(
        model_type="mpnet",
        variant="xformer",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine not in _ELSEWHERE},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "pooler": POOLER,
            **LANGUAGE_HEAD,
            **DENSE_CLASSIFIERS,
        },
        heads=tuple(
            head.renamed("Roberta", "MPNet", "mpnet.") for head in ROBERTA.heads if head.ours != "ForCausalLM"
        ),
        unread=("hidden_act",),
        native=False,
        components=COMPONENTS | {"position": ("combined",)},
    )
)
