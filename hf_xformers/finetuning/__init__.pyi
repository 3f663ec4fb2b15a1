# Written by scripts/make_stubs.py.
from .options import ModelOptions as ModelOptions
from .options import RunOptions as RunOptions
from .options import TaskData as TaskData
from .options import TaskOptions as TaskOptions
from .peft_methods import PEFT_METHODS as PEFT_METHODS
from .peft_methods import add_adapter as add_adapter
from .run import FineTuning as FineTuning
from .run import finetune as finetune
from .sources import load_rows as load_rows
from .tasks import Encoded as Encoded
from .tasks import TASKS as TASKS
from .tasks import Task as Task
from .tasks import TextClassification as TextClassification
from .tasks import Trivial as Trivial
from .tasks import build_task as build_task
from .tasks import register_task as register_task

__all__ = [
    "Encoded",
    "FineTuning",
    "ModelOptions",
    "PEFT_METHODS",
    "RunOptions",
    "TASKS",
    "Task",
    "TaskData",
    "TaskOptions",
    "TextClassification",
    "Trivial",
    "add_adapter",
    "build_task",
    "finetune",
    "load_rows",
    "register_task",
]
