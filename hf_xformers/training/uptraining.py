# SPDX-License-Identifier: Apache-2.0
"""Continued pretraining of a model that has been changed, alone or with a teacher."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .building import language_objective, objective_of_shape
from .devices import DeviceOptions
from .distillation import Distillation, DistillationTrainer, open_teacher, refuse_other_tokens
from .preparation import ModelChoice, Preparation, Prepared
from .pretraining import train
from .run_folder import saved_config
from .text import TextData

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments


@dataclass
class Uptraining:
    """Which model to train on, and how its rows are made."""

    _argument_group_name = "model"

    model: str = field(metadata={"help": "Folder of a saved model of this package, e.g. what a swap has written."})
    objective: str | None = field(
        default=None,
        metadata={"help": "{objectives}; settings as --objective.FIELD VALUE. Default: that of the model's shape."},
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of a model input. Default: by size, at most what positions cover."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Default: the tokenizer saved with the model."})
    segment_streams: bool | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": True,
            "help": (
                "Carry the segment memory along streams of text. Default: true for a causal model that has one, "
                "unless there is a --teacher, which reads every row by itself."
            ),
        },
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Replace what an earlier run has left in --output_dir."}
    )


def objective_of(model: str) -> str:
    """The objective that a saved model's shape is for. Raises ValueError where there is no config."""
    saved = saved_config(model)
    shape = "seq2seq" if saved.get("is_encoder_decoder") else "decoder" if saved.get("is_decoder") else "encoder"
    return objective_of_shape(shape).type


def prepare(
    choice: Uptraining,
    source: TextData,
    args: TrainingArguments,
    *,
    objective_fields: Mapping[str, Any] | None = None,
) -> Preparation:
    """The run as [`Preparation`] of a pretraining that starts from the model's weights.

    Raises ValueError for an objective of another shape than the model's, and what [`Preparation`] refuses.
    """
    own = objective_of(choice.model)
    if choice.objective is not None and language_objective(choice.objective).shape != language_objective(own).shape:
        raise ValueError(
            f"--objective {choice.objective} is not for the model {choice.model!r}, which is of the shape that {own}"
            " trains; leave it out"
        )
    start = ModelChoice(
        init_from=choice.model,
        objective=choice.objective or own,
        block_size=choice.block_size,
        tokenizer=choice.tokenizer,
        segment_streams=choice.segment_streams,
        overwrite_output_dir=choice.overwrite_output_dir,
    )
    return Preparation(start, source, args, objective_fields=objective_fields)


def uptrain(
    preparation: Preparation,
    distillation: Distillation,
    args: TrainingArguments,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    on_prepared: Any = None,
    devices: DeviceOptions | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and saves as [`train`] does; the teacher, if any, is checked before data is read.

    on_prepared: called with the prepared run before training. devices: how it is divided over processes.

    Raises ValueError and TypeError that name the value and the remedy.
    """
    distillation.check()
    devices = devices or DeviceOptions()
    trainer: Any = None
    if distillation.teacher is not None:
        preparation.this_run.refuse_own_source(distillation.teacher, "--teacher")
        if preparation.choice.segment_streams:
            raise ValueError(
                "--segment_streams lets the model read earlier rows, and a --teacher reads every row by itself; leave"
                " one of them out"
            )
        for name in devices.devices():
            devices.refuse(name, "divides the model alone, and a --teacher reads whole texts next to it")
        preparation.segment_streams = False
        head = f"For{preparation.objective.head}"
        teacher = open_teacher(distillation, preparation.config, head, preparation.block_size)
        refuse_other_tokens(distillation.teacher, str(preparation.choice.tokenizer or preparation.choice.init_from))
        trainer = functools.partial(DistillationTrainer, teacher=teacher, distillation=distillation)
    with preparation.this_run.lock():
        prepared: Prepared = preparation.run()
        if distillation.teacher is not None:
            prepared.plan["distillation"] = dataclasses.asdict(distillation)
        if on_prepared is not None:
            on_prepared(prepared)
        return train(prepared, args, callbacks, make_trainer=trainer, devices=devices.devices())
