# SPDX-License-Identifier: Apache-2.0
"""ELECTRA, generators and discriminators: `electra` <-> `xf_electra`.

The discriminator, which says of every token whether it was replaced, is `ForReplacedTokenDetection`. Where a dense
layer with GELU stands before a classifier of texts or of choices, it is our `classifier_transform`; models of earlier
releases, and those that were trained with a pooler, have it as their pooler.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, copied
from .bert import COMPONENTS, DENSE_CLASSIFIERS, EMBEDDINGS, FIELDS, LAYERS, refuse_relative_positions


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    refuse_relative_positions(config)
    narrow = config.embedding_size != config.hidden_size
    return {
        "embedding": {"type": "factorized", "width": config.embedding_size, "narrow_positions": True}
        if narrow
        else {"type": "token", "normalize": True},
        "feedforward": feedforward(config.hidden_act),
        "head": {"type": "transform", "activation": "gelu"},  # whatever `hidden_act` says
        "pooler_activation": "gelu",
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation(config.feedforward)[0],
        "embedding_size": config.embedding.table_width(config),
    }


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    projected = (copied("@embeddings_project.*", "@trunk.embedding.proj.*"),)
    return (*EMBEDDINGS, *(projected if config.embedding.type == "factorized" else ()), *LAYERS)


PLAIN = {"classifier_transform": "none"}
DENSE = {
    "add_pooler": False,
    "classifier_transform": "dense",
    "classifier_activation": "gelu",
    "classifier_bias": True,
}
POOLED = {**PLAIN, "add_pooler": True}
DISCRIMINATOR = (
    copied("discriminator_predictions.dense.*", "transform.dense.*"),
    copied("discriminator_predictions.dense_prediction.*", "classifier.*"),
)
DISCRIMINATING = {
    "classifier_transform": "dense",
    "classifier_bias": True,
    "classifier_activation": lambda config: activation(config.feedforward)[0],  # that of the layers
}

CONVERTER = register(
    Converter(
        model_type="electra",
        variant="xf_electra",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            # the token table again, as a rule: present where the rest of the head is not
            "projection": (copied("generator_lm_head.weight", "lm_head.decoder.weight"),),
            "generator": (
                copied("generator_predictions.dense.*", "lm_head.dense.*"),
                copied("generator_predictions.LayerNorm.*", "lm_head.norm.*"),
                copied("generator_lm_head.bias", "lm_head.decoder.bias"),
            ),
            "discriminator": DISCRIMINATOR,
            **DENSE_CLASSIFIERS,
            "sequence_transform": (copied("classifier.dense.*", "transform.dense.*"),),
            "choice_pooler": (copied("sequence_summary.summary.*", "@pooler.dense.*"),),
            "choice_transform": (copied("sequence_summary.summary.*", "transform.dense.*"),),
        },
        heads=(
            Head("ElectraModel", "Model", "", ("backbone",)),
            Head(
                "ElectraForPreTraining",
                "ForReplacedTokenDetection",
                "electra.",
                ("backbone", "discriminator"),
                causal=False,
                settings=DISCRIMINATING,
            ),
            Head(
                "ElectraForMaskedLM", "ForMaskedLM", "electra.", ("backbone", "projection", "generator"), causal=False
            ),
            Head(
                "ElectraForCausalLM", "ForCausalLM", "electra.", ("backbone", "projection", "generator"), causal=True
            ),
            *(
                Head(
                    "ElectraForSequenceClassification",
                    "ForSequenceClassification",
                    "electra.",
                    ("backbone", f"sequence_{part}", "sequence"),
                    settings=settings,
                )
                for part, settings in (("transform", DENSE), ("pooler", POOLED))
            ),
            Head(
                "ElectraForTokenClassification",
                "ForTokenClassification",
                "electra.",
                ("backbone", "token"),
                settings=PLAIN,
            ),
            Head(
                "ElectraForQuestionAnswering",
                "ForQuestionAnswering",
                "electra.",
                ("backbone", "spans"),
                settings=PLAIN,
            ),
            *(
                Head(
                    "ElectraForMultipleChoice",
                    "ForMultipleChoice",
                    "electra.",
                    ("backbone", f"choice_{part}", "choice"),
                    settings=settings,
                )
                for part, settings in (("transform", DENSE), ("pooler", POOLED))
            ),
        ),
        unread=("hidden_act",),
        training_only=("summary_last_dropout",),
        components=COMPONENTS | {"embedding": ("token", "factorized")},
    )
)
