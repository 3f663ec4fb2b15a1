# SPDX-License-Identifier: Apache-2.0
"""BigBird: `big_bird` <-> `xf_bigbird`.

transformers reads texts of at most (5 + 2 r) b tokens whole, for r random blocks of b tokens: `dense_length` here. In
longer ones its draws are random in training alone: in evaluation each "random" block is the first one of the text,
read r times more. Ours are drawn in evaluation, too, as the paper says, so that longer texts agree where r is 0. The
last global block is that of the padded batch there, and that of each text's real tokens here. Its decoder
(`BigBirdForCausalLM`) has no counterpart, as our pattern has no causal form; its head for questions is a layer of its
own, so that the model under it converts.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import copied, only_theirs
from .bert import BACKBONE, DENSE_CLASSIFIERS, FIELDS, LANGUAGE_HEAD

BASE_POOLER = {"pooler_activation": "tanh"}


def _dense_length(blocks: int, block_size: int) -> int:
    return (5 + 2 * blocks) * block_size


def attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Our attention component."""
    return {
        "type": "bigbird",
        "attention_type": config.attention_type,
        "block_size": config.block_size,
        "num_random_blocks": config.num_random_blocks,
        "dense_length": _dense_length(config.num_random_blocks, config.block_size),
    }


def attention_to_theirs(config: XFormerConfig) -> dict[str, Any]:
    """Their fields for it; their defaults where the attention is another, which is refused for that."""
    attention = config.attention
    return {
        "attention_type": getattr(attention, "attention_type", "block_sparse"),
        "block_size": getattr(attention, "block_size", 64),
        "num_random_blocks": getattr(attention, "num_random_blocks", 3),
    }


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "add_pooler": True,
        "embedding": {"type": "token", "normalize": True, "scale": config.rescale_embeddings},
        "attention": attention(config),
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation(config.feedforward)[0],
        "rescale_embeddings": getattr(config.embedding, "scale", False),
        **attention_to_theirs(config),
    }


def remarks(config: PreTrainedConfig) -> tuple[str, ...]:
    if config.attention_type != "block_sparse" or config.num_random_blocks == 0:
        return ()
    return (
        f"texts of more than {_dense_length(config.num_random_blocks, config.block_size)} tokens read"
        f" {config.num_random_blocks} random blocks, and in transformers, outside of training, the first block as many"
        " times more",
    )


CONVERTER = register(
    Converter(
        model_type="big_bird",
        variant="xf_bigbird",
        fields={**FIELDS, "sep_token_id": "sep_token_id"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "pooler": (copied("@pooler.*", "@pooler.dense.*"),),
            **LANGUAGE_HEAD,
            "pair": (copied("cls.seq_relationship.*", "classifier.*"),),
            **DENSE_CLASSIFIERS,
            "spans": (
                only_theirs(
                    "qa_classifier.intermediate.dense.*",
                    "qa_classifier.output.dense.*",
                    "qa_classifier.output.LayerNorm.*",
                    "qa_classifier.qa_outputs.*",
                ),
            ),
        },
        heads=(
            Head("BigBirdModel", "Model", "", ("backbone", "pooler"), settings=BASE_POOLER),
            Head(
                "BigBirdForPreTraining",
                "ForPreTraining",
                "bert.",
                ("backbone", "pooler", "projection", "mlm", "pair"),
                settings=BASE_POOLER,
            ),
            Head("BigBirdForMaskedLM", "ForMaskedLM", "bert.", ("backbone", "projection", "mlm")),
            Head(
                "BigBirdForSequenceClassification",
                "ForSequenceClassification",
                "bert.",
                ("backbone", "sequence_pooler", "sequence"),
                settings={"pooler_activation": lambda config: activation(config.feedforward)[0]},
            ),
            Head("BigBirdForTokenClassification", "ForTokenClassification", "bert.", ("backbone", "token")),
            Head(
                "BigBirdForMultipleChoice",
                "ForMultipleChoice",
                "bert.",
                ("backbone", "pooler", "choice"),
                settings=BASE_POOLER,
            ),
            Head("BigBirdForQuestionAnswering", "Model", "bert.", ("backbone", "pooler", "spans")),
        ),
        unread=("hidden_act",),
        unread_ours=("pooler_activation",),
        remarks=remarks,
    )
)
