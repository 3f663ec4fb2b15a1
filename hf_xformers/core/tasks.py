# SPDX-License-Identifier: Apache-2.0
"""Which task each text of a batch is of (model input `tasks` [B]), for components that are told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .call import Call, check_axes
from .prepared import State

TASKS = "tasks"


class TaskVector(State):
    """The vector z of each row's task, [B or 1, D]."""

    vector: Tensor


def task_numbers(context: Call, count: int) -> Tensor:
    """[B or 1] integer numbers of the tasks of the batch's rows, of `count` tasks that a model knows.

    Raises:
        ValueError: there are several tasks and the call says none, or the input has another shape.
    """
    tasks = context.inputs.get(TASKS)
    check_axes(TASKS, tasks, ("batch",))
    if tasks is not None:
        return tasks
    if count > 1:
        raise ValueError(f"This model is for {count} tasks: give `tasks` [batch], the number of each text's task.")
    return torch.zeros(1, dtype=torch.long, device=context.positions.device)


def number_of_tasks(config: Any) -> int | None:
    """How many tasks a model of this config tells apart; None where nothing in it is told the task."""
    trunk = config.tower("trunk")
    attentions = [trunk.layer(idx).attention for idx in range(trunk.num_hidden_layers)]
    return next((int(spec.num_tasks) for spec in (config.stack, *attentions) if TASKS in spec.inputs), None)


def any_task(config: Any, rows: int) -> dict[str, Tensor]:
    """What a model of several tasks is given where it is only looked at: the first task for every row; nothing for any
    other model."""
    told = number_of_tasks(config)
    return {TASKS: torch.zeros(rows, dtype=torch.long)} if told is not None and told > 1 else {}


def check_one_text(config: Any, component: str, count: int) -> None:
    """Refuses a decoder of an encoder-decoder that would need the task of what it writes.

    Raises:
        ValueError: there is more than one task.
    """
    if config.is_encoder_decoder and config.is_decoder and count > 1:
        raise ValueError(
            f"The input `tasks` describes the encoder's text, so that {component} in the decoder of an encoder-decoder"
            f" knows no task, and cannot have {count}; give the decoder another one (`decoder`), or `num_tasks=1`."
        )
