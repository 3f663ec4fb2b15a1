# SPDX-License-Identifier: Apache-2.0
"""Megatron-BERT: `megatron-bert` <-> `xf_megatron`, a BERT with the norms before the sublayers and one at the end."""

from __future__ import annotations

from ..base import Converter, Head, register
from ..rules import copied
from .bert import CLASSIFIERS, EMBEDDINGS, FIELDS, LANGUAGE_HEAD, LAYERS, POOLER, to_ours, to_theirs

_NORM = ".LayerNorm."
BACKBONE = (
    *(rule for rule in EMBEDDINGS if _NORM not in rule.theirs[0]),
    *(rule for rule in LAYERS if _NORM not in rule.theirs[0]),
    copied("@encoder.layer.{i}.attention.ln.*", "@trunk.layers.{i}.attention_residual.norm.*"),
    copied("@encoder.layer.{i}.ln.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
    copied("@encoder.ln.*", "@trunk.final_norm.*"),
)
LANGUAGE = ("projection", "mlm")

CONVERTER = register(
    Converter(
        model_type="megatron-bert",
        variant="xf_megatron",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine != "classifier_dropout"},
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": BACKBONE,
            "pooler": POOLER,
            **LANGUAGE_HEAD,
            "pair": (copied("cls.seq_relationship.*", "classifier.*"),),
            **CLASSIFIERS,
        },
        heads=(
            Head("MegatronBertModel", "Model", "", ("backbone", "pooler")),
            Head(
                "MegatronBertForPreTraining",
                "ForPreTraining",
                "bert.",
                ("backbone", "pooler", *LANGUAGE, "pair"),
                causal=False,
            ),
            Head("MegatronBertForMaskedLM", "ForMaskedLM", "bert.", ("backbone", *LANGUAGE), causal=False),
            Head("MegatronBertForCausalLM", "ForCausalLM", "bert.", ("backbone", *LANGUAGE), causal=True),
            Head(
                "MegatronBertForNextSentencePrediction",
                "ForNextSentencePrediction",
                "bert.",
                ("backbone", "pooler", "pair"),
                causal=False,
            ),
            Head(
                "MegatronBertForSequenceClassification",
                "ForSequenceClassification",
                "bert.",
                ("backbone", "pooler", "sequence"),
            ),
            Head("MegatronBertForTokenClassification", "ForTokenClassification", "bert.", ("backbone", "token")),
            Head("MegatronBertForQuestionAnswering", "ForQuestionAnswering", "bert.", ("backbone", "spans")),
            Head("MegatronBertForMultipleChoice", "ForMultipleChoice", "bert.", ("backbone", "pooler", "choice")),
        ),
        unread=("hidden_act",),
    )
)
