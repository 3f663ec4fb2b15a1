# SPDX-License-Identifier: Apache-2.0
"""A fine-tuned model as its run left it: the task, the weights (whole, or an adapter on its base) and the
tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.named import CONFIG_FILE as BOTTLENECK_FILE
from ..adapters.named import WEIGHTS_FILE as BOTTLENECK_WEIGHTS
from ..configuration_xformer import XFormerConfig
from ..training.run_folder import SUMMARY_FILE, read_summary
from . import loading
from .options import TaskOptions
from .tasks import TASKS, Task, Trivial, build_task, task_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PEFT_FILE = "adapter_config.json"
_TOLD_BY = ("config.json", SUMMARY_FILE, PEFT_FILE, BOTTLENECK_FILE, "tokenizer_config.json")
_TASK_OF_HEAD = {"TokenClassification": "token-classification", "QuestionAnswering": "question-answering",
                 "MultipleChoice": "multiple-choice", "TimeSeriesPrediction": "forecasting",
                 "ImageClassification": "image-classification", "CTC": "speech-recognition"}  # fmt: skip
_PROBLEMS = {"regression": "regression", "multi_label_classification": "multi-label-classification"}


@dataclass
class Trained:
    """record: `training_summary.json`; empty for a model from elsewhere. trivial: the baseline of the training
    rows."""

    task: Task
    model: Any
    tokenizer: Any  # what makes inputs of rows; None where the task does so itself
    config: PreTrainedConfig
    record: dict[str, Any]

    @property
    def trivial(self) -> Trivial | None:
        found = self.record.get("trivial")
        return Trivial(**found) if isinstance(found, dict) else None


def folder_of(name: str) -> Path:
    """The folder of a saved model, or the one that what it is told by is kept in for a Hub id."""
    from transformers.utils import cached_file

    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo", "connection_errors")}
    with contextlib.suppress(OSError, ValueError):  # what the loading then says in its own words
        found = [cached_file(name, file, **quiet) for file in _TOLD_BY]
        folder = next((Path(place).parent for place in found if place), folder)
        if (folder / BOTTLENECK_FILE).is_file():
            cached_file(name, BOTTLENECK_WEIGHTS, **quiet)
    return folder


def does_a_task(name: str) -> bool:
    """Whether a saved model is for a task of `finetune` other than language modeling."""
    folder = folder_of(name)
    if not folder.is_dir():
        return False
    record = read_summary(folder)
    if record.get("tasks"):
        return True
    task = record.get("task")
    if task in TASKS:
        return TASKS[task].predicts
    if (folder / PEFT_FILE).is_file() or (folder / BOTTLENECK_FILE).is_file():
        return True
    try:
        architectures = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    except (OSError, ValueError, AttributeError):
        return False
    return str(architectures[0]).endswith(("ForSequenceClassification", *(f"For{head}" for head in _TASK_OF_HEAD)))


def open_trained(
    name: str, *, task: str | None = None, base: str | None = None, tokenizer: str | None = None, **changes: Any
) -> Trained:
    """The model of a folder or Hub id, with the task and the columns of its run.

    task: for a model whose run is not known; of a run of several tasks the name of one. base: the model under an
    adapter, where it is no longer where it was. changes: fields of `TaskOptions` that differ from the run's.

    Raises ValueError for what is no fine-tuned model, damaged weights, and an adapter whose base is not to be found.
    """
    from ..data import check_tokenizer, load_tokenizer

    name, task = _one_of_several(name, task)
    folder = folder_of(name)
    record = read_summary(folder) if folder.is_dir() else {}
    adapter = next((file for file in (PEFT_FILE, BOTTLENECK_FILE) if (folder / file).is_file()), None)
    about = _read(folder / adapter) if adapter else {}
    start = _base_of(name, about, record, base) if adapter else name
    config = loading.open_config(start)
    made = build_task(_options(name, task, record, config, about, changes), type(config))
    if not made.predicts:
        raise ValueError(
            f"{name!r} is a language model, which says nothing of a row; measure it with `hf-xformers evaluate`, or"
            " continue texts with transformers' pipeline"
        )
    made.choose(getattr(config, "heads", ()), loading.architecture_of(config))
    if adapter:
        config = loading.saved_config_with(config, made.head, {}, {}, record.get("task_config", _labels_of(about)))
    words: Any = None
    if made.reads_text:
        chosen = tokenizer or (name if not folder.is_dir() or (folder / "tokenizer_config.json").is_file() else start)
        words = load_tokenizer(chosen)
        loading.fit_tokenizer(words, config)
        check_tokenizer(words, config)
    else:
        words = made.processor(config, name)
    loading.check_lengths(made, config, None)
    made.restore(config, record.get("task_facts", {}))
    made.read_config(config)
    model = _load(folder, start, adapter, config, made) if adapter else _whole(name, config, made)
    return Trained(made, model, words, config, record)


def _one_of_several(name: str, task: str | None) -> tuple[str, str | None]:
    """Of a run of several tasks the folder of the one that is named; of other models what was given."""
    folder = Path(name).expanduser()
    whole = not folder.is_dir() or (folder / "config.json").is_file()
    tasks = [] if whole else list(read_summary(folder).get("tasks", ()))
    if not tasks:
        return name, task
    if task in tasks:
        return str(folder / str(task)), None
    asked = "name one" if task is None else f"{task!r} is none of them; name one"
    raise ValueError(f"{name!r} holds models for the tasks {', '.join(tasks)}; {asked} with --task")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no valid JSON; save the adapter again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds no settings; save the adapter again")
    return content


def _base_of(name: str, about: Mapping[str, Any], record: Mapping[str, Any], given: str | None) -> str:
    """The model that an adapter is on: the one given, else where it was at training."""
    known = [about.get("base_model_name_or_path"), about.get("base_model"), record.get("init_from")]
    named = [str(place) for place in known if place]
    found = given or next((place for place in named if Path(place).expanduser().is_dir()), None)
    if found is None and named and not named[0].startswith((".", "/", "~")):
        found = named[0]  # an id of the Hub
    if found is None:
        raise ValueError(
            f"{name!r} holds an adapter, and its model {named[0] if named else 'is not named'!r} is not there; say"
            " where it is with --base_model"
        )
    return found


def _options(
    name: str,
    task: str | None,
    record: Mapping[str, Any],
    config: PreTrainedConfig,
    about: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> TaskOptions:
    wanted = task_class(task).id if task else record.get("task") or _task_of(name, config, about)
    same = record.get("task") == wanted
    known = {field.name for field in dataclasses.fields(TaskOptions)}
    before = {key: value for key, value in record.get("task_options", {}).items() if key in known} if same else {}
    given = {key: value for key, value in changes.items() if value not in (None, [])}
    return TaskOptions(**{**before, **given, "task": wanted})


def _task_of(name: str, config: PreTrainedConfig, about: Mapping[str, Any]) -> str:
    """The task by the class that a model was saved as."""
    architecture = str(about.get("architecture") or loading.architecture_of(config) or "")
    for head, task in _TASK_OF_HEAD.items():
        if architecture.endswith(f"For{head}"):
            return task
    if architecture.endswith("ForSequenceClassification"):
        if isinstance(config, XFormerConfig) and config.reads_colors == "only":
            return "image-classification"
        return _PROBLEMS.get(
            config.problem_type or "", "regression" if config.num_labels == 1 else "text-classification"
        )
    raise ValueError(
        f"{name!r} is saved as {architecture or 'no class'}, which does not say what it was trained for; name it with"
        " --task, or take a model that `hf-xformers finetune` trained"
    )


def _labels_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """The labels that a bottleneck adapter is saved with."""
    names = about.get("id2label")
    return {"id2label": {int(key): value for key, value in names.items()}} if isinstance(names, dict) else {}


def _whole(name: str, config: PreTrainedConfig, task: Task) -> Any:
    if not loading.has_head(config, task.head) and loading.architecture_of(config):
        raise ValueError(
            f"{name!r} is saved as {loading.architecture_of(config)}, and {task.id} needs a For{task.head} class;"
            " fine-tune it first with `hf-xformers finetune`"
        )
    return loading.load_model(name, config, task.head, has_head=True, new_head=False)[0]


def _load(folder: Path, base: str, file: str, config: PreTrainedConfig, task: Task) -> Any:
    """The base with the adapter of a folder on it."""
    import peft
    from safetensors import SafetensorError

    from ..adapters import load_adapter

    saved = loading.open_config(base)
    kept = loading.has_head(saved, task.head)
    # Of a model that reads sounds the vocabulary is what another task has labels for.
    count = "vocab_size" if task.head == "CTC" else "num_labels"
    other = kept and getattr(saved, count) != getattr(config, count)
    model, _ = loading.load_model(base, config, task.head, has_head=kept, new_head=other)
    if file == BOTTLENECK_FILE:
        load_adapter(model, folder)
        return model
    try:
        return peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the adapter in {str(folder)!r} does not load onto {base!r} ({reason}); give the model that it was"
            " trained on with --base_model, or save the adapter again"
        ) from error
