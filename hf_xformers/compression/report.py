# SPDX-License-Identifier: Apache-2.0
"""The table before and after a compression: parameters, size on disk, time of a batch, quality next to its baseline.

```python
>>> before, after = compare(source, folder, Measuring(max_eval_rows=500))
>>> write_table(before, after, folder, command="prune", settings={"method": "heads", "share": 0.4})
>>> columns, rows = table(before, after)  # texts, for `cli.console.print_table`
```

`measure(folder, measuring) -> Row` takes one model alone; [`compare`] takes two and times them by turns, which is what
a disturbed machine needs. A model is what `hf-xformers evaluate` takes: of a fine-tuned one the quality is its task's
metric, on its own held-out rows or on `eval_data`; of a pretrained language model its objective's loss.

compression.json   what was done to the model of a folder, step by step, the first of all first
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..core.saved_files import read_object, weight_files, write_json
from .rows import table_form

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..finetuning.options import TaskData

FILE = "compression.json"


@dataclass
class Measuring:
    """What the table is measured on. A group of options for any command that compresses."""

    _argument_group_name = "table before and after"

    eval_data: list[str] = field(
        default_factory=list,
        metadata={"help": "Rows or text that quality is measured on. Default: what the model's training held out."},
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "Split of it. Default: test, else validation; of text validation."}
    )
    max_eval_rows: int | None = field(default=None, metadata={"help": "Measure a task on the first rows alone."})
    eval_batch_size: int = field(default=16, metadata={"help": "Rows of a batch, for quality and for the time."})
    time_batches: int = field(default=5, metadata={"help": "Batches that are timed; 0: none."})
    time_length: int = field(default=128, metadata={"help": "Their tokens, at most what positions cover."})
    use_cpu: bool = field(default=False, init=False)  # an option of Trainer: commands set it from there
    # What a run on text reads, as its summary has it, in place of what each of the models was trained on.
    text: dict[str, Any] = field(default_factory=dict, init=False)
    # How the rows of a run are read, in place of how those of each model's training were.
    form: dict[str, Any] = field(default_factory=dict, init=False)

    def read_rows_of(self, source: TaskData, known: Mapping[str, Any]) -> None:
        """Takes rows of a run for both models, unless they are held out as those of the first model were. known: what
        that was trained on, by the same names."""
        wanted = dataclasses.asdict(source)
        decisive = wanted.keys() & known.keys() - {"max_train_rows", "max_eval_rows"}
        if not self.eval_data and (not decisive or any(wanted[name] != known[name] for name in decisive)):
            self.eval_data = source.test_data or source.validation_data or source.data
            self.form = table_form({"dataset": wanted})

    def check(self) -> None:
        """Raises `ValueError` for numbers that make no sense."""
        for name, least in (("max_eval_rows", 1), ("eval_batch_size", 1), ("time_batches", 0), ("time_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value} must be at least {least}")


@dataclass
class MeasuringOfTask(Measuring):
    """The same next to `TaskData`, whose `--max_eval_rows` limits the rows of the table too."""

    max_eval_rows: int | None = field(default=None, init=False)  # commands set it from there


@dataclass(frozen=True)
class Row:
    """One model's line.

    Args:
        model: folder or Hub id.
        parameters, nonzero: tensors that the model learns, tied ones once.
        bytes: the files of its weights.
        seconds: of a batch (the median), None where it was not timed.
        metric: the figure that stands for its quality.
        quality: that figure.
        less_is_better: whether it is an error.
        baseline: the same figure without a model (the trivial answer; the frequencies of tokens).
        figures: all that was measured.
    """

    model: str
    parameters: int
    nonzero: int
    bytes: int
    seconds: float | None = None
    metric: str | None = None
    quality: float | None = None
    less_is_better: bool = False
    baseline: float | None = None
    figures: dict[str, float] = field(default_factory=dict)


def measure(model: str | Path, measuring: Measuring | None = None) -> Row:
    """The row of a saved model. Raises `ValueError` for one that cannot be measured, with the remedy."""
    measuring = measuring or Measuring()
    measuring.check()
    row, opened = _measured(str(model), measuring)
    return dataclasses.replace(row, seconds=seconds_by_turns([opened], measuring)[0])


def compare(before: str | Path | Row, after: str | Path, measuring: Measuring | None = None) -> tuple[Row, Row]:
    """The rows of two saved models, timed by turns. before: may be a [`Row`] that is measured already, whose time is
    then taken anew."""
    measuring = measuring or Measuring()
    measuring.check()
    if isinstance(before, Row):
        first, start = before, open_model(before.model)
    else:
        first, start = _measured(str(before), measuring)
    second, end = _measured(str(after), measuring)
    times = seconds_by_turns([start, end], measuring)
    return dataclasses.replace(first, seconds=times[0]), dataclasses.replace(second, seconds=times[1])


def open_model(name: str | Path) -> PreTrainedModel:
    """A saved model with the head that it is used with, in evaluation mode. Raises `ValueError` where it cannot be
    read."""
    from ..finetuning.trained import does_a_task, open_trained
    from ..training.scoring import choose_objective, load_config, load_model, refuse_reader_of_images, training_of

    name = str(name)
    if does_a_task(name):
        return open_trained(name).model.eval()
    config, trained = load_config(name), training_of(name)
    refuse_reader_of_images(name, config, trained)
    objective = choose_objective(config, None, {}, trained)
    return load_model(name, objective).eval()


def refuse_adapter(model: Any, what: str) -> None:
    """Raises `ValueError` for an adapter of peft on its base. what: the model, for the message."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"{what} is an adapter on its base; merge the two with peft's `merge_and_unload()`, save the result, and"
            " give that"
        )


def refuse_any_adapter(model: Any, what: str) -> None:
    """Raises `ValueError` for an adapter of peft or of this package: a saved model holds neither."""
    from ..adapters.bottleneck import STATE

    refuse_adapter(model, what)
    state = getattr(model, STATE, None)
    if state is not None and state.configs:
        raise ValueError(
            f"{what} is its base with the adapter {next(iter(state.configs))!r}, which the result could not be"
            " saved with; give a model that was trained without one"
        )


def refuse_processes(args: Any, *, trains: bool = True) -> None:
    """Raises `ValueError` for several processes: one alone measures, whose Trainer would wait for the others. And for
    several GPUs of one process in training: Trainer would copy the model to each, without what is put around it."""
    if args.world_size > 1:
        raise ValueError(
            f"a compression is measured before and after in one process, and this is one of {args.world_size}; start"
            " the command without a launcher"
        )
    if trains and getattr(args, "n_gpu", 1) > 1:
        raise ValueError(
            f"a compression trains on one GPU, and this process sees {args.n_gpu}; set CUDA_VISIBLE_DEVICES=0"
        )


def _measured(name: str, measuring: Measuring) -> tuple[Row, PreTrainedModel]:
    from ..finetuning.trained import does_a_task

    opened = open_model(name)
    quality = _task_quality(name, measuring) if does_a_task(name) else _language_quality(name, measuring)
    parameters, nonzero = count(opened)
    return Row(name, parameters, nonzero, size_on_disk(name, opened), **quality), opened


# ------------------------------------------------------------------------------------------------ figures


def count(model: nn.Module) -> tuple[int, int]:
    """(numbers that a model learns, those of them that are not zero); tied ones once."""
    total = kept = 0
    for parameter in model.parameters():
        total += parameter.numel()
        plain = parameter.detach()
        if type(plain) not in (torch.Tensor, nn.Parameter) and hasattr(plain, "dequantize"):  # quantized
            plain = plain.dequantize()
        kept += int(torch.count_nonzero(plain))
    return total, kept


def size_on_disk(name: str, model: nn.Module) -> int:
    """Bytes of the files of a folder's weights; of a Hub id, of the model's tensors."""
    folder = Path(name).expanduser()
    if folder.is_dir() and (files := weight_files(folder)):
        return sum(path.stat().st_size for path in files)
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


@torch.no_grad()
def seconds_by_turns(models: list[PreTrainedModel], measuring: Measuring) -> list[float | None]:
    """Median seconds of the forward pass of each model on the same batch of random tokens; None for all where nothing
    is timed, or a model reads no tokens."""
    configs = [model.config for model in models]
    if not measuring.time_batches or any(getattr(config, "vocab_size", None) is None for config in configs):
        return [None] * len(models)
    device = torch.device("cuda" if torch.cuda.is_available() and not measuring.use_cpu else "cpu")
    placed = [cast(Any, model).to(device).eval() for model in models]
    calls = [_call(model, batch) for model, batch in zip(placed, _batches(models, measuring, device))]
    try:
        for call in calls:
            call()
    except (ValueError, TypeError):  # it reads more than tokens
        return [None] * len(models)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(measuring.time_batches):
        for found, call in zip(times, calls):
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in times]


def _batches(models: list[PreTrainedModel], measuring: Measuring, device: torch.device) -> list[dict[str, Any]]:
    from ..training.building import longest_input

    limits = [longest_input(model.config) for model in models]
    length = min([measuring.time_length, *(limit for limit in limits if limit is not None)])
    size = (measuring.eval_batch_size, length)
    generator = torch.Generator().manual_seed(0)
    sizes = [getattr(model.config, name, None) for model in models for name in ("vocab_size", "decoder_vocab_size")]
    ids = torch.randint(min(filter(None, sizes)), size, generator=generator).to(device)
    found = []
    for model in models:
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append({**batch, "decoder_input_ids": ids} if model.config.is_encoder_decoder else batch)
    return found


def _call(model: PreTrainedModel, batch: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: model(**batch)


def _task_quality(name: str, measuring: Measuring) -> dict[str, Any]:
    from ..finetuning.predicting import Prediction, predict
    from ..training.run_folder import read_summary

    record = read_summary(Path(name).expanduser())
    if not (measuring.eval_data or "dataset" in record or "tasks" in record):
        raise ValueError(f"{name!r} does not say what data it was trained with; give --eval_data")
    wanted = Prediction(
        model=name,
        data=measuring.eval_data,
        **((measuring.form or table_form(record)) if measuring.eval_data else {}),
        split=measuring.eval_split,
        max_eval_rows=measuring.max_eval_rows,
        batch_size=measuring.eval_batch_size,
        use_cpu=measuring.use_cpu,
        progress=False,
    )
    found = predict(wanted, answers=True)
    task = found.trained.task
    return {
        "metric": task.metric,
        "quality": found.metrics.get(task.metric),
        "less_is_better": task.is_error(task.metric),
        "baseline": found.baseline.get(task.metric),
        "figures": {**found.metrics, **{f"baseline_{key}": value for key, value in found.baseline.items()}},
    }


def _language_quality(name: str, measuring: Measuring) -> dict[str, Any]:
    from transformers import TrainingArguments

    from ..training.scoring import Score, evaluate, text_of, training_of
    from ..training.text import TextData

    trained = {**training_of(name), **measuring.text}
    source = TextData(**{**text_of(trained), **({"data": measuring.eval_data} if measuring.eval_data else {})})
    with tempfile.TemporaryDirectory() as folder:  # nothing is written; Trainer wants a folder all the same
        args = TrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=trained.get("eval_streams") or measuring.eval_batch_size,
            seed=trained.get("seed", 42),
            use_cpu=measuring.use_cpu,
            disable_tqdm=True,
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        split, block_size = measuring.eval_split or "validation", trained.get("block_size")
        figures = evaluate(Score(model=name, split=split, block_size=block_size), source, args)
    numbers = {key: value for key, value in figures.items() if isinstance(value, (int, float)) and key != "seconds"}
    return {
        "metric": "loss",
        "quality": figures["loss"],
        "less_is_better": True,
        "baseline": figures["baseline_loss"],
        "figures": numbers,
    }


# ------------------------------------------------------------------------------------------------ the table


def table(before: Row, after: Row) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of texts: what was measured, before, after, and after by before (of quality: minus before)."""
    rows = [
        ["parameters", f"{before.parameters:,}", f"{after.parameters:,}", _ratio(before.parameters, after.parameters)],
        ["not zero", f"{before.nonzero:,}", f"{after.nonzero:,}", _ratio(before.nonzero, after.nonzero)],
        ["size on disk", _megabytes(before.bytes), _megabytes(after.bytes), _ratio(before.bytes, after.bytes)],
    ]
    if before.seconds is not None and after.seconds is not None:
        times = [f"{1000 * row.seconds:.1f} ms" for row in (before, after) if row.seconds is not None]
        rows.append(["time of a batch", *times, _ratio(before.seconds, after.seconds)])
    if before.quality is not None and after.quality is not None:
        values = [f"{value:.4f}" for value in (before.quality, after.quality)]
        change = round(after.quality - before.quality, 4) + 0.0  # no "-0.0000"
        rows.append([before.metric or "quality", *values, f"{change:+.4f}"])
    if before.baseline is not None:
        after_baseline = before.baseline if after.baseline is None else after.baseline
        rows.append(["... baseline", f"{before.baseline:.4f}", f"{after_baseline:.4f}", ""])
    return ["", "before", "after", "change"], rows


def _ratio(before: float, after: float) -> str:
    return f"x {after / before:.3f}" if before else ""


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def write_table(
    before: Row, after: Row, folder: str | Path, *, command: str, settings: Mapping[str, Any] | None = None
) -> Path:
    """Adds one step to the account of a folder's model, after those that its source's folder knows; returns the file.

    command: what was done, such as 'prune'; settings: how, as JSON can hold it.
    """
    step = {
        "command": command,
        "settings": dict(settings or {}),
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
    }
    path = Path(folder).expanduser() / FILE
    write_json(path, {"steps": [*read_steps(before.model), step]})
    return path


def read_steps(folder: str | Path) -> list[dict[str, Any]]:
    """What was done to the model of a folder, step by step; empty where nothing is known. Raises `ValueError` for a
    file that is damaged."""
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        return []
    steps = read_object(path).get("steps")
    if not isinstance(steps, list):
        raise ValueError(f"{str(path)!r} is no account of a compression; remove it, or copy it again")
    return steps
