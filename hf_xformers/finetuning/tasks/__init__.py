# SPDX-License-Identifier: Apache-2.0
"""The tasks: one file each. A task knows what its rows mean, what the model reads, and what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ...core.given_options import changed
from ..names import TASK_NAMES, resolve_task
from ..options import TaskOptions
from .answering import QuestionAnswering
from .base import Encoded, Task, Trivial
from .choice import MultipleChoice
from .classification import Regression, TextClassification
from .color_images import ColorClassification
from .extraction import ExtractiveSummarization
from .forecasting import Forecasting
from .generation import Summarization, Translation
from .images import ImageClassification
from .language import LanguageModeling
from .multilabel import MultiLabelClassification
from .speech import SpeechRecognition
from .tagging import TokenClassification

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AnyTask = TypeVar("AnyTask", bound=Task)
OF_EVERY_TASK = ("task", "max_length", "class_balance")  # options; `Task` refuses what cannot be
TASKS: dict[str, type[Task]] = {
    task.id: task
    for task in (
        TextClassification,
        MultiLabelClassification,
        Regression,
        TokenClassification,
        QuestionAnswering,
        MultipleChoice,
        Summarization,
        ExtractiveSummarization,
        Translation,
        LanguageModeling,
        Forecasting,
        ImageClassification,
        SpeechRecognition,
    )
}


# Other ways to do a task, of models that read something else.
OTHER_WAYS: tuple[type[Task], ...] = (ColorClassification,)


def build_task(options: TaskOptions, config_class: type[PreTrainedConfig] | None = None) -> Task:
    """The task that `options.task` names, as models with such configurations do it. Raises ValueError for an unknown
    one or an option out of range."""
    usual = task_class(options.task)
    ways = [way for way in OTHER_WAYS if config_class is not None and way.id == usual.id and way.serves(config_class)]
    return (ways or [usual])[0](options)


def refuse_unread(options: TaskOptions, *others: str) -> None:
    """Raises ValueError for an option that says something to other tasks alone. others: tasks of the same run, which
    share the options."""
    asked = [task_class(name) for name in (options.task, *others)]
    read = {*OF_EVERY_TASK, *(name for task in asked for name in task.reads)}
    for name, value in changed(options).items():
        if name not in read:
            readers = [task.id for task in TASKS.values() if name in task.reads]
            said = " ".join(map(str, value)) if isinstance(value, list) else repr(value)
            raise ValueError(
                f"--{name} {said} means nothing to {' or '.join(task.id for task in asked)}; it is for"
                f" {', '.join(readers)}; leave it out"
            )


def register_task(task: type[AnyTask]) -> type[AnyTask]:
    """Class decorator: enters a task under its `id`, which `--task` then takes.

    Raises:
        ValueError: there is a task of that id.
    """
    if TASKS.get(task.id, task).__qualname__ != task.__qualname__:
        raise ValueError(f"There is a task {task.id!r}, {TASKS[task.id].__name__}; choose another `id`.")
    if task.id not in TASKS:
        TASK_NAMES.append(task.id)
    TASKS[task.id] = task
    return task


def task_class(name: str) -> type[Task]:
    """The class of a task's name or alias. Raises ValueError for an unknown one."""
    return TASKS[resolve_task(name)]


__all__ = [
    "TASKS",
    "Encoded",
    "Forecasting",
    "ExtractiveSummarization",
    "ImageClassification",
    "LanguageModeling",
    "MultiLabelClassification",
    "MultipleChoice",
    "QuestionAnswering",
    "Regression",
    "SpeechRecognition",
    "Summarization",
    "Task",
    "TextClassification",
    "TokenClassification",
    "Translation",
    "Trivial",
    "build_task",
    "refuse_unread",
    "register_task",
    "task_class",
]
