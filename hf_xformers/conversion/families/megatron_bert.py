# SPDX-License-Identifier: Apache-2.0
"""Megatron-BERT: `megatron-bert` <-> `xf_megatron`, a BERT with the norms before the sublayers and one at the end."""

from __future__ import annotations

import dataclasses

from ..base import register
from ..rules import copied
from .bert import CONVERTER as BERT
from .bert import EMBEDDINGS, FIELDS, LAYERS

_NORM = ".LayerNorm."
BACKBONE = (
    *(rule for rule in EMBEDDINGS if _NORM not in rule.theirs[0]),
    *(rule for rule in LAYERS if _NORM not in rule.theirs[0]),
    copied("@encoder.layer.{i}.attention.ln.*", "@trunk.layers.{i}.attention_residual.norm.*"),
    copied("@encoder.layer.{i}.ln.*", "@trunk.layers.{i}.feedforward_residual.norm.*"),
    copied("@encoder.ln.*", "@trunk.final_norm.*"),
)
CONVERTER = register(
    dataclasses.replace(
        BERT,
        model_type="megatron-bert",
        variant="xf_megatron",
        fields={mine: theirs for mine, theirs in FIELDS.items() if mine != "classifier_dropout"},
        groups={**BERT.groups, "backbone": BACKBONE},
        heads=tuple(head.renamed("Bert", "MegatronBert", "bert.") for head in BERT.heads),
    )
)
