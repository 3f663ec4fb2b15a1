# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's folder knows about its training: this package's summary, or what Trainer's scripts leave
there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.saved_files import SUMMARY_FILE, read_object

# Figures that are no score: how long it took, on how much.
_NO_SCORE = re.compile(
    r"(runtime|samples|steps|tokens|_per_second|epoch|rows|model_preparation_time|jit_compilation_time)"
)
_FLOOR = "baseline_"  # begins the names of a language model's baselines
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass
class TrainingRecord:
    """
    Args:
        facts: what was trained on what, in words and figures.
        scores: (split, metric) -> value.
        baselines: the same of the trivial baseline, which `baseline_rule` describes for a task.
        f1_name: what F1 is of.
        datasets: Hub ids.
        data: the data in words.
        base_model: the Hub id of what training started from.
        languages: of the data.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    scores: dict[tuple[str, str], float] = field(default_factory=dict)
    baselines: dict[tuple[str, str], float] = field(default_factory=dict)
    baseline_rule: str | None = None
    f1_name: str | None = None
    datasets: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    task: str | None = None
    base_model: str | None = None
    languages: list[str] = field(default_factory=list)


def read_record(folder: Path) -> TrainingRecord:
    """The record of a run's folder, or of one of its `checkpoint-*` folders; empty for a model from elsewhere."""
    run, summary, results = _run_of(folder), read_summary_of(folder), _json(folder / "all_results.json")
    state = _json(folder / "trainer_state.json")
    record = TrainingRecord(task=summary.get("task"))
    _read_data(record, summary)
    # A student starts from what its teacher has given it, which is named on its own.
    start = None if summary.get("distillation") else summary.get("init_from")
    if isinstance(start, str) and is_hub_id(start, "model"):
        record.base_model = start
    objective = summary.get("objective")
    steps = summary.get("steps", state.get("global_step"))
    epochs = summary.get("epochs", state.get("epoch"))
    if run != folder:  # the figures at this checkpoint, not at the end
        steps, epochs = state.get("global_step", steps), state.get("epoch", epochs)
    facts = {
        "objective": objective.get("type") if isinstance(objective, dict) else None,
        "task": record.task,
        "data": ", ".join(record.data) or None,
        "started from": record.base_model or (Path(start).name if isinstance(start, str) else None),
        "teacher": _teacher(summary.get("distillation")),
        "fine-tuned with": summary.get("peft"),
        "training rows": summary.get("train_rows"),
        "held-out rows": summary.get("validation_rows"),
        "tokens per row": summary.get("block_size", summary.get("max_length")),
        "steps": steps,
        "rows per step": summary.get("rows_per_step"),
        "learning rate": summary.get("learning_rate"),
        "epochs": epochs,
        "processes": summary.get("processes"),
        "seed": summary.get("seed"),
        "training loss (last logged)": _last(state, "loss")
        if run != folder
        else summary.get("train_loss", _last(state, "loss")),
    }
    record.facts = {name: value for name, value in facts.items() if value is not None}
    figures = {**_last_evaluation(state), **_scores(results), **({} if run != folder else _scores(summary))}
    record.scores = {key: float(value) for key, value in figures.items() if not key[1].startswith(_FLOOR)}
    record.baselines = _baselines(figures, summary if run == folder else {})
    record.f1_name = summary.get("f1_name")
    record.baseline_rule = (summary.get("trivial") or {}).get("rule")
    return record


def read_summary_of(folder: Path) -> dict[str, Any]:
    """`training_summary.json` of the run that a folder is or belongs to; empty if there is none. Raises `ValueError`
    for one that is damaged."""
    path = _run_of(folder) / SUMMARY_FILE
    return read_object(path) if path.is_file() else {}


def _run_of(folder: Path) -> Path:
    inner = folder.name.startswith("checkpoint-") and not (folder / SUMMARY_FILE).exists()
    return folder.parent if inner else folder


def is_hub_id(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether a name that was loaded here was an id of the Hub. `runs/bert` may be one or a folder that is gone by
    now: what came from the Hub has left its folder in the cache."""
    from huggingface_hub import constants

    if HUB_ID.fullmatch(name) is None:
        return False
    return (Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}").is_dir()


def _read_data(record: TrainingRecord, summary: dict[str, Any]) -> None:
    source = summary.get("dataset") or summary.get("data") or {}
    given = source.get("data") if isinstance(source, dict) else None
    names = [given] if isinstance(given, str) else list(given or [])
    for name in names:
        if name == "stdlib":
            record.data.append("the documentation of Python's standard library")
            record.languages = ["en"] if len(names) == 1 else []
        elif is_hub_id(name, "dataset"):
            record.datasets.append(name)
            record.data.append(name)
        else:  # where it lies on this machine is nobody's business
            record.data.append(Path(name).name)
    for key in ("source_lang", "target_lang"):
        language = source.get(key) if isinstance(source, dict) else None
        if language:
            record.languages.append(str(language).split("_")[0].lower())


def _teacher(distillation: Any) -> str | None:
    name = distillation.get("teacher") if isinstance(distillation, dict) else None
    return None if not isinstance(name, str) else name if is_hub_id(name, "model") else Path(name).name


def _scores(figures: dict[str, Any]) -> dict[tuple[str, str], float]:
    found = {}
    for key, value in figures.items():
        split, _, metric = key.partition("_")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if split in ("eval", "test") and number and not _NO_SCORE.search(metric):
            metric = re.sub("^floor_", _FLOOR, metric)  # the name in earlier folders
            found["validation" if split == "eval" else "test", metric] = value
    return found


def _baselines(figures: dict[tuple[str, str], Any], summary: dict[str, Any]) -> dict[tuple[str, str], float]:
    """What can be said without the model, by metric: language models have it among their
    figures, tasks apart."""
    found = {(split, name.removeprefix(_FLOOR)): value for (split, name), value in figures.items() if _FLOOR in name}
    for split in ("validation", "test"):
        own = summary.get(f"baseline_{split}") or summary.get(f"floor_{split}") or {}
        found |= {(split, name): value for name, value in own.items()}
    return {key: float(value) for key, value in found.items()}


def _last_evaluation(state: dict[str, Any]) -> dict[tuple[str, str], float]:
    for entry in reversed(state.get("log_history") or []):
        found = _scores(entry)
        if found:
            return found
    return {}


def _last(state: dict[str, Any], key: str) -> Any:
    return next((entry[key] for entry in reversed(state.get("log_history") or []) if key in entry), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
