# SPDX-License-Identifier: Apache-2.0
"""EuroBERT: `eurobert` -> `xformer`. Llama that reads both sides.

Its classifier of texts has a hidden layer before the labels; with `classifier_pooling="bos"` it reads the first slot,
padding or not, and ours the first real token.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, Head, register
from ..rules import Rule, copied
from . import llama


def _mlm(config: XFormerConfig) -> tuple[Rule, ...]:
    return (llama.linear("lm_head", "lm_head.decoder", config.head.bias),)


# Their `classifier_pooling` and ours.
POOLINGS = {"bos": "first", "mean": "mean", "late": "late_mean"}


def _pooling(config: XFormerConfig) -> str:
    """What their `classifier_pooling` can say, of ours."""
    known = (*POOLINGS.values(), "auto")
    return config.classifier_pooling if config.classifier_pooling in known else "first"


def _our_pooling(name: str) -> str:
    if name not in POOLINGS:
        raise ValueError(f"classifier_pooling={name!r} does not convert; these do: {', '.join(map(repr, POOLINGS))}.")
    return POOLINGS[name]


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.to_ours(config),
        "classifier_pooling": _our_pooling(config.classifier_pooling),
        "is_decoder": False,
        "head": {"type": "linear", "bias": config.mlp_bias},
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    named = {ours: theirs for theirs, ours in POOLINGS.items()}
    return {**llama.to_theirs(config), "classifier_pooling": named.get(_pooling(config), "bos")}


CONVERTER = register(
    Converter(
        model_type="eurobert",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": llama.backbone,
            "mlm": _mlm,
            "labels": (copied("classifier.*", "classifier.*"),),
            "hidden": (copied("dense.*", "transform.dense.*"),),
        },
        heads=(
            Head("EuroBertModel", "Model", "", ("backbone",)),
            Head("EuroBertForMaskedLM", "ForMaskedLM", "model.", ("backbone", "mlm")),
            Head("EuroBertForTokenClassification", "ForTokenClassification", "model.", ("backbone", "labels")),
            Head(
                "EuroBertForSequenceClassification",
                "ForSequenceClassification",
                "model.",
                ("backbone", "hidden", "labels"),
                settings={
                    "add_pooler": False,
                    "classifier_pooling": _pooling,
                    "classifier_transform": "dense",
                    "classifier_activation": "gelu",
                    "classifier_bias": True,
                },
            ),
        ),
        components=llama.COMPONENTS,
        unread=("hidden_act", "pretraining_tp", "rope_parameters", "mask_token_id"),
    )
)
