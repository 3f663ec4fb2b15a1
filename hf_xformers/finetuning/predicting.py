# SPDX-License-Identifier: Apache-2.0
"""What a fine-tuned model says of new rows, and how right it is, next to what can be said without a model."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.given_options import changed
from ..objectives.base import SeededCollator
from .multi_task import WithTaskNumber
from .options import TaskData, TaskOptions
from .origin import columns_of
from .run import write_lines
from .tasks import Encoded, SpeechRecognition, Task, Translation
from .trained import Trained, open_trained

if TYPE_CHECKING:
    from datasets import Dataset

_NAMES_OF_ROWS = ("id", "idx", "guid", "qid")
_PREFERRED = ("test", "validation", "train")


@dataclass
class Prediction:
    """What to predict, or to evaluate, with a fine-tuned model."""

    _argument_group_name = "prediction"

    model: str = field(metadata={"help": "Folder of a fine-tuned model or adapter, or a Hub id."})
    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": (
                "Files of the forms that finetune reads, also .txt with a text per line, images and sounds themselves,"
                " a folder or a Hub id."
            )
        },
    )
    text: list[str] = field(default_factory=list, metadata={"help": "Texts themselves, instead of --data."})
    text_pair: list[str] = field(
        default_factory=list, metadata={"help": "The second text of each --text: of a question its context."}
    )
    output: str | None = field(
        default=None,
        metadata={"help": "File of the predictions, .jsonl or .csv. Default of predict: JSON lines are printed."},
    )
    split: str | None = field(
        default=None, metadata={"help": "Split of the data. Default: test, else validation, else train."}
    )
    task: str | None = field(
        default=None,
        metadata={"help": "Of several tasks the name of one; else the task of a model that finetune did not train."},
    )
    base_model: str | None = field(
        default=None,
        metadata={"help": "The model under an adapter. Default: where it was when the adapter was trained."},
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Default: the tokenizer saved with the model."})
    text_column: str | None = field(default=None, metadata={"help": "Default of all columns: as in the training."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of a second text."})
    label_column: str | None = field(default=None, metadata={"help": "Column of the true label, tags or answers."})
    image_column: str | None = field(default=None, metadata={"help": "Column of images, or of their paths."})
    audio_column: str | None = field(default=None, metadata={"help": "Column of sounds, or of their paths."})
    target_column: str | None = field(default=None, metadata={"help": "Column of the text to generate."})
    choice_columns: list[str] = field(default_factory=list, metadata={"help": "Columns of the choices."})
    column_names: list[str] = field(
        default_factory=list, metadata={"help": "Names of the columns of CSV or TSV files without a header line."}
    )
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    encoding: str = field(default="utf-8", metadata={"help": "Of files of text, such as latin-1."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Take only the first rows."})
    batch_size: int = field(default=16, metadata={"help": "Rows of a batch; rows of like lengths are put together."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams of generation. Default: the model's own."})
    max_target_length: int | None = field(default=None, metadata={"help": "Tokens of a generated text."})
    label_threshold: float | None = field(
        default=None, metadata={"help": "Multi-label: a label is predicted if its probability is above this."}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Leave an accelerator alone."})
    progress: bool = field(default=True, metadata={"help": "Show a bar, which a terminal gets; --no_progress: none."})


@dataclass
class TaskEvaluation(Prediction):
    """What to measure, and how to say it."""

    json: bool = field(default=False, metadata={"help": "Print JSON instead of a table."})


@dataclass
class Predicted:
    """rows: one for each row of the data, in its order. metrics: where the rows have answers. baseline: the same
    metrics of what `rule` says of every row."""

    trained: Trained
    rows: list[dict[str, Any]]
    split: str
    metrics: dict[str, float]
    baseline: dict[str, float]
    rule: str | None


def predict(wanted: Prediction, *, answers: bool = False) -> Predicted:
    """Runs a fine-tuned model over rows. answers: the rows must have true answers, which are measured.

    Raises ValueError for a model, data or option that does not fit.
    """
    for name in ("batch_size", "max_eval_rows", "num_beams", "max_target_length"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if bool(wanted.data) == bool(wanted.text) and not (answers and not wanted.text):
        raise ValueError("give either --data, files of rows, or --text, texts themselves")
    output_kind(wanted.output)
    trained = open_trained(
        wanted.model,
        task=wanted.task,
        base=wanted.base_model,
        tokenizer=wanted.tokenizer,
        text_column=wanted.text_column,
        text_pair_column=wanted.text_pair_column,
        label_column=wanted.label_column,
        image_column=wanted.image_column,
        audio_column=wanted.audio_column,
        ctc_beams=wanted.num_beams,
        target_column=wanted.target_column,
        choice_columns=wanted.choice_columns,
        max_target_length=wanted.max_target_length,
        label_threshold=wanted.label_threshold,
    )
    task = trained.task
    _refuse_unread(wanted, task)
    if isinstance(task, SpeechRecognition):  # what it reads of transcripts is told by the model's vocabulary
        task.needs_transcripts = answers
    split, rows = _rows(wanted, trained)
    if wanted.max_eval_rows is not None:
        rows = rows.select(range(min(wanted.max_eval_rows, len(rows))))
    named = wanted.label_column is not None or wanted.target_column is not None
    task.find_columns(rows, answers=answers or named)
    encoded = task.encode(rows, trained.tokenizer, "test")
    if answers and not encoded.labelled:
        raise ValueError("the rows have no true answers to measure with; take `hf-xformers predict` for such rows")
    predicted, metrics = _run(wanted, trained, encoded)
    found = {name: metrics[f"test_{name}"] for name in ("loss", *task.metric_names) if f"test_{name}" in metrics}
    trivial = (trained.trivial or task.trivial(encoded)) if encoded.labelled else None
    baseline = task.baseline(trivial, predicted, encoded) if trivial is not None else {}
    own = len(predicted) == len(rows)  # windows of a series are no rows
    kept = [name for name in _NAMES_OF_ROWS if own and name in columns_of(rows)]
    predicted = [{**{name: rows[name][n] for name in kept}, **row} for n, row in enumerate(predicted)]
    rule = None if trivial is None else trivial.rule if trained.trivial else f"{trivial.rule}, by these rows"
    return Predicted(trained, predicted, split, found if encoded.labelled else {}, baseline, rule)


def _refuse_unread(wanted: Prediction, task: Task) -> None:
    """Raises ValueError for an option that is of other tasks."""
    beams = ("num_beams",) if task.generates or "ctc_beams" in task.reads else ()
    of_tasks = {field.name for field in dataclasses.fields(TaskOptions)} - {"task"} | {"num_beams"}
    for name, value in changed(wanted).items():
        if name in of_tasks - {*task.reads, *beams}:
            said = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(f"--{name} {said} means nothing to a model for {task.id}; leave it out")


# ------------------------------------------------------------------------------------------------ rows


def _rows(wanted: Prediction, trained: Trained) -> tuple[str, Dataset]:
    """(name of the split, rows) of texts, files, or of the data that the model was trained with."""
    task = trained.task
    if wanted.text:
        if not task.reads_text:
            raise ValueError(f"--text gives texts, and a model for {task.id} reads none; give its rows with --data")
        for name in ("split", "column_names", "data_config", "max_eval_rows"):
            if getattr(wanted, name):
                raise ValueError(f"--{name} is about files, and --text gives the texts themselves; leave one out")
        return "text", _of_texts(task, wanted.text, wanted.text_pair)
    if wanted.text_pair:
        raise ValueError("--text_pair goes with --text; files have columns of their own")
    single = [name for name in wanted.data if Path(name).suffix.lower() in task.row_files]
    plain = [name for name in wanted.data if _is_plain(name, task)]
    for some, what in ((single, "is a row by itself"), (plain, "holds a text per line")):
        if some and len(some) < len(wanted.data):
            other = next(name for name in wanted.data if name not in some)
            raise ValueError(f"{some[0]!r} {what} and {other!r} is not such a file; give the one kind or the other")
    if single:
        paths = [Path(name).expanduser() for name in single]
        missing = next((str(path) for path in paths if not path.is_file()), None)
        if missing is not None:
            raise ValueError(f"there is no file {missing!r}; correct the path")
        return "all", task.of_files(list(map(str, paths)))
    if plain:
        from ..data.delimited import reading_as, text_lines

        with reading_as(wanted.encoding):
            lines = [line for name in plain for line in text_lines(Path(name).expanduser()) if line.strip()]
        if not lines:
            raise ValueError(f"{plain[0]!r} holds no text; give a file with a text per line")
        return "test", _of_texts(task, lines, [])
    source = TaskData(
        data=wanted.data, data_config=wanted.data_config, column_names=wanted.column_names, encoding=wanted.encoding
    )
    source.validation_fraction = 0.0
    if not wanted.data:
        before = trained.record.get("dataset")
        if not isinstance(before, dict):
            raise ValueError(f"{wanted.model!r} does not say what data it was trained with; give --data")
        source = TaskData(**before)
    splits = task.load(source)
    names = [wanted.split] if wanted.split else [name for name in _PREFERRED if name in splits]
    if names[0] not in splits:
        raise ValueError(f"the data has no split {names[0]!r}: choose one of {', '.join(splits)} with --split")
    whole = bool(wanted.data) and list(splits) == ["train"]  # files whose names say nothing
    return "all" if whole else names[0], splits[names[0]]


def _is_plain(name: str, task: Task) -> bool:
    """Whether a file holds a text per line: .txt, or the source side of parallel text."""
    path = Path(name).expanduser()
    suffixes = [".txt"]
    if isinstance(task, Translation) and task.options.source_lang:
        other = path.with_suffix(f".{task.options.target_lang}")
        suffixes += [f".{task.options.source_lang}"] if not other.exists() else []
    return path.is_file() and path.suffix in suffixes


def _of_texts(task: Task, texts: Sequence[str], pairs: Sequence[str]) -> Dataset:
    from datasets import Dataset

    first, second = task.options.text_column, task.options.text_pair_column
    if first is None:
        first, usual = task.usual_texts(bool(pairs) or second is not None)
        second = second or usual
    if second is None and pairs:
        raise ValueError(
            "--text_pair is for models that read pairs of texts, and this one reads single ones; leave it out"
        )
    if second is not None and len(pairs) != len(texts):
        raise ValueError(
            f"the model reads pairs of texts, and there are {len(texts)} first and {len(pairs)} second ones; give as"
            " many --text_pair as --text"
        )
    task.options.text_column = first
    task.options.text_pair_column = second
    values: dict[str, list[Any]] = {
        first: [text.split() for text in texts] if task.id == "token-classification" else list(texts)
    }
    if second is not None:
        values[second] = list(pairs)
    return Dataset.from_dict(values)


# ------------------------------------------------------------------------------------------------ the model


def _run(wanted: Prediction, trained: Trained, encoded: Encoded) -> tuple[list[dict[str, Any]], dict[str, float]]:
    from transformers import Seq2SeqTrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from .trainer import TaskTrainer

    task = trained.task
    with tempfile.TemporaryDirectory() as folder:  # nothing is written; Trainer wants a folder all the same
        args = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=wanted.batch_size,
            generation_num_beams=wanted.num_beams,
            predict_with_generate=True,
            use_cpu=wanted.use_cpu,
            disable_tqdm=not wanted.progress,
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        collator = task.collator(trained.tokenizer, trained.model, args.seed)
        number = trained.record.get("task_number")
        if number is not None:  # one of several tasks, of a model that is told which
            collator = WithTaskNumber(collator, number)
        trainer = TaskTrainer(
            model=trained.model,
            args=args,
            task=task,
            validation=encoded,
            data_collator=collator.as_static() if isinstance(collator, SeededCollator) else collator,
            processing_class=trained.tokenizer,
        )
        trainer.remove_callback(PrinterCallback)  # the caller prints
        return trainer.predict_rows(encoded, "test", by_length=True)


# ------------------------------------------------------------------------------------------------ files


def output_kind(name: str | None) -> str:
    """jsonl or csv, by the suffix of a file. Raises ValueError for another suffix, and for a folder that is not
    there."""
    if name is None:
        return "jsonl"
    path = Path(name).expanduser()
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(
            f"--output {name!r} ends in neither .jsonl nor .csv, the forms of predictions; take one of them"
        )
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--output {name!r} is in a folder that is not there; make it first")
    return path.suffix[1:]


def write_predictions(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a file at once. Lists and mappings stand in CSV as JSON."""
    path = Path(name).expanduser()
    if output_kind(name) == "jsonl":
        write_lines(path, rows)
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    os.replace(temporary, path)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
