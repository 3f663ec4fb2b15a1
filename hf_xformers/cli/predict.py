# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers predict`: what a fine-tuned model says of new rows; and `evaluate` for such models."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Parser, parse_command
from .console import is_main_process, print_facts, say, share_text

_DESCRIPTION = """Predict with a model or adapter that `hf-xformers finetune` trained: of every row of a file the
label, tags, answer or text, with probabilities where the task has them, as JSONL or CSV in the order of the file.

Task, columns and lengths are those of the training. For example:

  hf-xformers predict --model runs/reviews --text "a fine film"
  hf-xformers predict --model runs/reviews --data new.csv --output predictions.csv"""
_EVALUATION = """Evaluate a fine-tuned model or adapter: the task's metrics on rows with true answers, compared with
the trivial baseline, what can be said without a model.

Without --data: the split that its training held out. For example:

  hf-xformers evaluate --model runs/reviews --data test.csv --output predictions.jsonl"""


def run(argv: Sequence[str]) -> int:
    from ..finetuning.predicting import Prediction, predict, write_predictions

    wanted = _parsed(argv, Prediction, "predict", _DESCRIPTION)
    found = predict(wanted)
    if not is_main_process():
        return 0
    if wanted.output is None:
        for row in found.rows:
            print(json.dumps(row, ensure_ascii=False))
    else:
        write_predictions(wanted.output, found.rows)
        say(f"{len(found.rows):,} predictions of {found.trained.task.id} written to {wanted.output}")
    if found.metrics:
        shown = beside_baseline(found.metrics, found.baseline, None, found.trained.task.f1_name())
        figures = ", ".join(f"{name} {value}" for name, value in shown.items())
        say(f"measured on these rows: {figures}" + (f"; baseline: {found.rule}" if found.rule else ""))
    return 0


def run_evaluation(argv: Sequence[str]) -> int:
    """`hf-xformers evaluate` of a model for a task."""
    from ..finetuning.predicting import TaskEvaluation, predict, write_predictions

    wanted = _parsed(argv, TaskEvaluation, "evaluate", _EVALUATION)
    if wanted.text:
        raise ValueError(
            "evaluate measures rows with true answers; give them with --data, or take `hf-xformers predict`"
        )
    found = predict(wanted, answers=True)
    if not is_main_process():
        return 0
    if wanted.output is not None:
        write_predictions(wanted.output, found.rows)
    facts = {
        "model": wanted.model,
        "variant": found.trained.config.model_type,
        "task": found.trained.task.id,
        "split": found.split,
        "rows": len(found.rows),
    }
    if wanted.json:
        baseline = {"rule": found.rule, **found.baseline} if found.rule else None
        print(json.dumps({**facts, "data": wanted.data, **found.metrics, "baseline": baseline}, indent=2))
        return 0
    shown = beside_baseline(found.metrics, found.baseline, found.rule, found.trained.task.f1_name())
    data = " ".join(wanted.data) or "of the training"
    print_facts("evaluated", {**facts, "data": data, **shown, "predictions": wanted.output})
    return 0


def beside_baseline(
    metrics: Mapping[str, float], baseline: Mapping[str, float], rule: str | None, f1_name: str | None = None
) -> dict[str, str]:
    """Metrics as text, each with the trivial one, and what that is. f1_name: what F1 is of."""

    def called(name: str) -> str:
        return f1_name if name == "f1" and f1_name is not None else name.replace("_", " ")

    def text(name: str, value: float) -> str:
        return share_text(value) if name == "accuracy" else f"{value:.4g}"

    shown = {
        called(name): text(name, value) + (f" (baseline {text(name, baseline[name])})" if name in baseline else "")
        for name, value in metrics.items()
    }
    return {**shown, "baseline": rule} if rule else shown


def _parsed(argv: Sequence[str], options: type, command: str, description: str) -> Any:
    def make_parser(first_look: Mapping[str, Any]) -> Parser:
        parser = Parser([options], prog=f"hf-xformers {command}", description=description)
        parser.set_defaults(progress=sys.stderr.isatty())
        return parser

    (wanted,) = parse_command(argv, (), make_parser).dataclasses
    if not wanted.progress:
        import datasets
        from transformers.utils.logging import disable_progress_bar

        datasets.disable_progress_bars()
        disable_progress_bar()
    return wanted
