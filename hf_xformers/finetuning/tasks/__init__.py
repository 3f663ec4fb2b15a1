"""The tasks: one file each. A task knows what its rows mean, what the model reads, and what is measured."""

from __future__ import annotations

import difflib

from ..options import TaskOptions
from .answering import QuestionAnswering
from .base import Encoded, Task
from .choice import MultipleChoice
from .classification import Regression, TextClassification
from .generation import Summarization, Translation
from .language import LanguageModeling
from .multilabel import MultiLabelClassification
from .tagging import TokenClassification

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
        Translation,
        LanguageModeling,
    )
}


def build_task(options: TaskOptions) -> Task:
    """The task that `options.task` names. Raises ValueError for an unknown one or an option out of range."""
    return task_class(options.task)(options)


def task_class(name: str) -> type[Task]:
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}{hint}")
    return TASKS[name]


__all__ = [
    "TASKS",
    "Encoded",
    "LanguageModeling",
    "MultiLabelClassification",
    "MultipleChoice",
    "QuestionAnswering",
    "Regression",
    "Summarization",
    "Task",
    "TextClassification",
    "TokenClassification",
    "Translation",
    "build_task",
    "task_class",
]
