# SPDX-License-Identifier: Apache-2.0
"""Nystromformer: `nystromformer` <-> `xf_nystromformer`.

transformers takes landmarks as means over `segment_means_seq_len` places, padding among them, which texts must then be
padded to; its convolution reads the values of padding, too. Where `num_landmarks` is the same number, as it is by
default, attention is exact. Ours reads real tokens alone: the two agree in rows without padding.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, activation_name, feedforward
from ..base import Converter, Head, register
from ..rules import copied
from .bert import BACKBONE, DENSE_CLASSIFIERS, FIELDS, LANGUAGE_HEAD

OFFSET = 2  # rows of their position table before the first token's


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if config.inv_coeff_init_option:
        raise ValueError(
            "inv_coeff_init_option=True does not convert: transformers itself makes no model with it; set it to False."
        )
    return {
        "add_pooler": True,
        "embedding": {"type": "token", "normalize": True},
        "position": {"type": "learned_absolute", "offset": OFFSET},
        "first_position": OFFSET,
        "attention": {
            "type": "nystromformer",
            "num_landmarks": config.num_landmarks,
            "text_length": config.segment_means_seq_len,
            "conv_kernel_size": config.conv_kernel_size,
            "pinv_init": "global",
        },
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": activation_name(config.hidden_act)},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    attention = config.attention
    length = getattr(attention, "text_length", None)
    return {
        "hidden_act": activation(config.feedforward)[0],
        "num_landmarks": getattr(attention, "num_landmarks", 64),
        "segment_means_seq_len": config.max_position_embeddings if length is None else length,
        "conv_kernel_size": getattr(attention, "conv_kernel_size", None) or 1,
    }


CONVERTER = register(
    Converter(
        model_type="nystromformer",
        variant="xf_nystromformer",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine not in ("classifier_dropout", "is_decoder")},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": (
                *BACKBONE,
                copied("@encoder.layer.{i}.attention.self.conv.weight", "@trunk.layers.{i}.attention.conv.weight"),
            ),
            **LANGUAGE_HEAD,
            **DENSE_CLASSIFIERS,
            "choice_pooler": (copied("pre_classifier.*", "@pooler.dense.*"),),
        },
        heads=(
            Head("NystromformerModel", "Model", "", ("backbone",), settings={"add_pooler": False}),
            Head("NystromformerForMaskedLM", "ForMaskedLM", "nystromformer.", ("backbone", "projection", "mlm")),
            Head(
                "NystromformerForSequenceClassification",
                "ForSequenceClassification",
                "nystromformer.",
                ("backbone", "sequence_pooler", "sequence"),
                settings={"pooler_activation": lambda config: activation(config.feedforward)[0]},
            ),
            Head(
                "NystromformerForTokenClassification",
                "ForTokenClassification",
                "nystromformer.",
                ("backbone", "token"),
            ),
            Head("NystromformerForQuestionAnswering", "ForQuestionAnswering", "nystromformer.", ("backbone", "spans")),
            Head(
                "NystromformerForMultipleChoice",
                "ForMultipleChoice",
                "nystromformer.",
                ("backbone", "choice_pooler", "choice"),
                settings={"pooler_activation": "relu"},
            ),
        ),
        unread=("hidden_act",),
        unread_ours=("pooler_activation",),
    )
)
