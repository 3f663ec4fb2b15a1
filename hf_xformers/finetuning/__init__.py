# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: tasks (what rows mean, what is measured), their data, models with a new head, PEFT, and the run itself.

Names are imported when they are first used: `datasets`, `peft` and transformers' Trainer are slow to load.
"""

from __future__ import annotations

from ..core.lazy import lazily

_NAMES = {
    "TASKS": "tasks",
    "Task": "tasks",
    "Encoded": "tasks",
    "TextClassification": "tasks",
    "Trivial": "tasks",
    "build_task": "tasks",
    "register_task": "tasks",
    "ModelOptions": "options",
    "RunOptions": "options",
    "TaskData": "options",
    "TaskOptions": "options",
    "FineTuning": "run",
    "finetune": "run",
    "PEFT_METHODS": "peft_methods",
    "add_adapter": "peft_methods",
    "load_rows": "sources",
}

__all__ = list(_NAMES)
__getattr__ = lazily(__name__, _NAMES)
