# SPDX-License-Identifier: Apache-2.0
"""ERNIE: `ernie` <-> `xf_bert`.

With `use_task_id` a vector for the task is added to every token's: an `id_tables` of the embedding, whose input has
transformers' name `task_type_ids`. Without that input both sides take task 0. transformers' class for several
choices cannot read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import register
from ..rules import Rule, copied
from . import bert

TASKS = "task_type_ids"


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    tables = ((TASKS, config.task_type_vocab_size),) if config.use_task_id else ()
    return bert.to_ours(config) | {"embedding": {"type": "token", "normalize": True, "id_tables": tables}}


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    tables = dict(getattr(config.embedding, "id_tables", ()))
    rows = {"task_type_vocab_size": tables[TASKS]} if TASKS in tables else {}
    return bert.to_theirs(config) | {"use_task_id": TASKS in tables, **rows}


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    tasks = copied("@embeddings.task_type_embeddings.weight", f"@trunk.embedding.id_tables.{TASKS}.weight")
    return (*bert.backbone(config), *((tasks,) if TASKS in config.embedding.inputs else ()))


CONVERTER = register(
    dataclasses.replace(
        bert.CONVERTER,
        model_type="ernie",
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={**bert.CONVERTER.groups, "backbone": _backbone},
        heads=tuple(head.renamed("Bert", "Ernie", "ernie.") for head in bert.CONVERTER.heads),
        unread=("hidden_act", "task_type_vocab_size"),  # the rows of a table that only `use_task_id` makes
        native=False,
    )
)
