# SPDX-License-Identifier: Apache-2.0
"""Training settings that suit fine-tuning, by task, width and method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..training.presets import nearest_size, size_named, training_defaults
from ..training.run_folder import saved_config

# Peak rates for trained weights; random weights take those of pretraining, adapters ten times these.
_RATES = {"tiny": 3e-4, "small": 1e-4, "base": 5e-5, "large": 2e-5}
ADAPTER_FACTOR = 10


def finetuning_defaults(task: str | None, model: str | None, size: str | None, peft: str | None) -> dict[str, Any]:
    """Defaults of `Seq2SeqTrainingArguments`: an evaluation and a checkpoint per epoch, and the best one in the end.

    Args:
        task, model, size, peft: as on the command line; names that do not exist are refused later, by what needs them.
    """
    from .names import known_task
    from .tasks import TASKS

    if model is not None:
        folder = Path(model).expanduser()
        width = saved_config(folder).get("hidden_size") if (folder / "config.json").is_file() else 768
        size = size or nearest_size(width if isinstance(width, int) else 768)
    size = size or "tiny"
    fresh = size_named(size).learning_rate
    rate = fresh if model is None else _RATES[size] * (ADAPTER_FACTOR if peft else 1)
    chosen = TASKS.get(known_task(task or "") or "")
    return {
        **training_defaults(size),
        "learning_rate": rate,
        "num_train_epochs": 3.0,
        "adam_beta2": 0.999,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "eval_steps": None,
        "load_best_model_at_end": True,
        "metric_for_best_model": chosen.metric if chosen is not None else "loss",
        "predict_with_generate": True,
    }
