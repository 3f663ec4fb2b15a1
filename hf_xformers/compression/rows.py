# SPDX-License-Identifier: Apache-2.0
"""What a model's training left: its rows, in batches with what its loss needs, its tokenizer and its record."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.saved_files import SUMMARY_FILE, saving_into, write_json
from ..objectives.base import SeededCollator
from ..training.run_folder import read_summary, remove_results

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def training_batches(
    name: str, model: PreTrainedModel, data: Sequence[str], rows: int, batch_size: int, seed: int
) -> list[dict[str, Any]]:
    """Batches of at most `rows` training rows, drawn by `seed`, for a model that was opened from `name`. data: other
    rows or texts than those of its training.

    Raises:
        ValueError: no rows are known, or they do not fit.
    """
    from ..finetuning.trained import does_a_task

    made = _of_task if does_a_task(name) else _of_text
    features, collator = made(name, model, list(data), seed)
    if isinstance(collator, SeededCollator):
        collator = collator.as_static()
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    taken = [features[int(index)] for index in order[:rows]]
    return [dict(collator(taken[first : first + batch_size])) for first in range(0, len(taken), batch_size)]


def task_data(name: str, data: Sequence[str], record: dict[str, Any]) -> Any:
    """The rows of a task: those given, or those of the model's training.

    Raises:
        ValueError: neither is known.
    """
    from ..finetuning.options import TaskData

    if data:
        return TaskData(data=list(data), **table_form(record))
    before = record.get("dataset")
    if not isinstance(before, dict):
        raise ValueError(f"{name!r} does not say what data it was trained with; give --data")
    return TaskData(**before)


def table_form(record: Mapping[str, Any]) -> dict[str, Any]:
    """How the files of a run are read, for others like them: the columns where no header line names them, and the
    encoding."""
    before = record.get("dataset")
    known = before if isinstance(before, dict) else {}
    return {name: known[name] for name in ("column_names", "encoding") if name in known}


def text_data(name: str, data: Sequence[str]) -> Any:
    """The text of a language model: that given, or that of its training, cut as that was."""
    from ..training.scoring import text_of, training_of
    from ..training.text import TextData

    return TextData(**{**text_of(training_of(name)), **({"data": list(data)} if data else {})})


def _of_task(name: str, model: PreTrainedModel, data: Sequence[str], seed: int) -> tuple[Any, Any]:
    from ..finetuning.trained import open_trained

    trained = open_trained(name)
    splits = trained.task.load(task_data(name, data, trained.record))
    rows = splits["train"]
    trained.task.find_columns(rows, answers=True)
    encoded = trained.task.encode(rows, trained.tokenizer, "train")
    return encoded.features, trained.task.collator(trained.tokenizer, model, seed)


def _of_text(name: str, model: PreTrainedModel, data: Sequence[str], seed: int) -> tuple[Any, Any]:
    from ..data import load_tokenizer
    from ..training.building import choose_block_size
    from ..training.scoring import choose_objective, load_config, training_of
    from ..training.text import load_splits, make_rows

    trained = training_of(name)
    config: Any = load_config(name)
    objective = choose_objective(config, None, {}, trained).bound_to(config)
    source = text_data(name, data).named_for(objective)
    tokenizer = load_tokenizer(name)
    block_size = choose_block_size(config, objective, "base", trained.get("block_size"))
    rows = make_rows(load_splits(source, objective)["train"], tokenizer, objective, block_size, whole=False)
    return rows, objective.fitted(rows, tokenizer).collator(tokenizer, seed=seed)


@contextmanager
def saving_result(folder: Path) -> Iterator[Path]:
    """[`saving_into`] of a model, in whose place nothing of an earlier result stays: no adapter, and where it has no
    record itself no record."""
    with saving_into(folder) as staging:
        yield staging
        saved = {path.name for path in staging.iterdir()}
    remove_results(folder, saved)
    if SUMMARY_FILE not in saved:
        (folder / SUMMARY_FILE).unlink(missing_ok=True)


def save_rest(name: str, folder: Path, **record: Any) -> None:
    """Writes what belongs to a model besides config and weights, and so to what is made of it: the tokenizer, and the
    record of the training, in which `record` stands in place of the figures of the model before."""
    from ..finetuning.trained import does_a_task, folder_of

    source = folder_of(name)
    files, local = _carried_files(source), Path(name).expanduser().is_dir()
    for path in files:
        shutil.copy2(path, folder / path.name)
    if not files or not local:  # the cache of a Hub id may lack files of the tokenizer
        _save_tokenizer(name, folder)
    # Language models of the Hub are measured without their record, and so is what is made of them.
    known = read_summary(source) if local or does_a_task(name) else {}
    if known:
        write_json(folder / SUMMARY_FILE, {**_without_figures(known), **record})


def _save_tokenizer(name: str, folder: Path) -> None:
    from ..data import load_tokenizer

    try:
        load_tokenizer(name).save_pretrained(folder)
    except (OSError, ValueError):
        return  # it reads no text


def _carried_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    left = [
        SUMMARY_FILE,
        "config.json",
        "generation_config.json",
        "trainer_state.json",
        "README.md",
        "compression.json",
    ]
    left += [f"{name}_results.json" for name in ("all", "eval", "train")]
    weights = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".index.json")
    graphs = (".onnx", ".onnx.data", ".onnx_data", ".tflite")
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in left and not path.name.endswith((*weights, *graphs, ".lock", ".jsonl"))
    ]


def _without_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    names = ("eval_", "test_", "baseline_", "exits_", "train_loss", "best_checkpoint", "trained_parameters")
    figures = (*names, "floor_")  # which began the names of baselines in 0.1.0
    kept = ("eval_streams", "test_rows")
    return {key: value for key, value in summary.items() if key in kept or not key.startswith(figures)}
