# SPDX-License-Identifier: Apache-2.0
"""What a fine-tuning can be asked for: one dataclass each for the model, the data, the task and the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..training.devices import ExpertOptions
from ..training.recipe import Recipe
from . import names
from .layerwise import LayerwiseOptions
from .self_ensemble import SelfEnsembleOptions


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


@dataclass
class ModelOptions:
    """Where the weights and the tokenizer come from; component and configuration options come besides it."""

    _argument_group_name = "model"

    model: str | None = field(
        default=None, metadata={"help": "Folder of a saved model, or a Hub id, whose weights to start from."}
    )
    variant: str | None = field(
        default=None, metadata={"help": "Variant to start from random weights instead (see `hf-xformers list`)."}
    )
    size: str | None = field(
        default=None, metadata={"help": "tiny, small, base or large, of a --variant; also chooses training defaults."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer, a folder or a Hub id. Default: the one saved with the model."}
    )
    train_tokenizer: bool = field(
        default=False,
        metadata={"help": "Train a tokenizer on the training rows. The default with --variant and no --tokenizer."},
    )
    tokenizer_type: str = field(
        default="bpe",
        metadata={
            "aliases": ["--tokenizer_kind"],
            "help": "Type of a tokenizer that is trained: bpe, wordpiece, unigram or words.",
        },
    )
    new_head: bool = field(
        default=False,
        metadata={"help": "Make the task's head anew although the model has one (for other labels, say)."},
    )


@dataclass
class TaskData:
    """Where the rows come from and what their columns are called."""

    _argument_group_name = "data"

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": (
                "Files (JSONL, JSON, CSV, TSV, Parquet, CoNLL, parallel text), a folder or a Hub dataset id. Several "
                "files are divided by their names: train, dev or validation, test."
            )
        },
    )
    validation_data: list[str] = field(
        default_factory=list, metadata={"help": "Files of the validation rows, if their names do not say so."}
    )
    test_data: list[str] = field(default_factory=list, metadata={"help": "Files of the test rows."})
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    column_names: list[str] = field(
        default_factory=list, metadata={"help": "Names of the columns of CSV or TSV files without a header line."}
    )
    validation_fraction: float = field(
        default=0.1,
        metadata={"help": "Share of the rows that is held out where the source has no validation split."},
    )
    encoding: str = field(default="utf-8", metadata={"help": "Of files of text, such as latin-1."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Use only the first rows of the training."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Use only the first rows of the other splits."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the data."})


@dataclass
class TaskOptions:
    """The task, its columns and its lengths. What is of other tasks the command refuses, and a task ignores."""

    _argument_group_name = "task"

    task: str = field(
        metadata={
            "help": f"{', '.join(names.TASK_NAMES)}; also by other names: {', '.join(sorted(names.TASK_ALIASES))}."
        },
    )
    text_column: str | None = field(
        default=None,
        metadata={
            "help": (
                "Column of the text (or tokens, article, question). Default: the first of the usual names that is"
                f" there: of texts {_listed(names.TEXT_PAIRS)}; of words {_listed(names.WORDS)}; to summarize"
                f" {_listed(names.LONG_TEXTS)}; of questions {_listed(names.QUESTIONS)}; next to choices"
                f" {_listed(names.CHOICE_TEXTS)}; of transcripts {_listed(names.TRANSCRIPTS)}; to translate the"
                " language, or source."
            )
        },
    )
    text_pair_column: str | None = field(
        default=None,
        metadata={
            "help": (
                "Column of a second text. Default: what goes with the first, as in"
                f" {_listed(f'{a}/{b}' for a, b in names.TEXT_PAIRS.items() if b)}; of a question"
                f" {_listed(names.CONTEXTS)}."
            )
        },
    )
    label_column: str | None = field(
        default=None,
        metadata={
            "help": (
                "Column of the label (or tags, answers). Default: the first of the usual names that is there: of"
                f" classes {_listed(names.CLASS_LABELS)}; of numbers {_listed(names.NUMBER_LABELS)}; of several labels"
                f" {_listed(names.LABEL_LISTS)}; of tags {_listed(names.TAGS)}; of answers {_listed(names.ANSWERS)};"
                f" of choices {_listed(names.CHOICE_LABELS)}."
            )
        },
    )
    label_separator: str | None = field(
        default=None,
        metadata={"help": "Multi-label: the separator of the labels of a row, in files that hold no lists (CSV)."},
    )
    label_threshold: float = field(
        default=0.5, metadata={"help": "Multi-label: a label is predicted if its probability is above this."}
    )
    class_balance: float = field(
        default=0.0,
        metadata={
            "help": (
                "Classification of texts and images, tagging: how much more rare classes count in the loss, from 0"
                " (every example counts alike) to 1 (every class does). About 0.5 finds more entities where nearly all"
                " words are outside."
            )
        },
    )
    target_column: str | None = field(
        default=None,
        metadata={
            "help": (
                "Column of the text to generate. Default: of translations the language, or target; of summaries"
                f" {_listed(names.SUMMARIES)}."
            )
        },
    )
    choice_columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": f"Columns of the choices. Default: one of {_listed(names.CHOICES)}, or ending0, ending1, ..."
        },
    )
    source_lang: str | None = field(
        default=None, metadata={"help": "Translation: language, and suffix of parallel files, to translate from."}
    )
    target_lang: str | None = field(default=None, metadata={"help": "Translation: language to translate to."})
    prefix: str = field(default="", metadata={"help": "Text to put before every source text, as T5 wants."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a model input. Default: by task, at most what positions cover."}
    )
    max_target_length: int | None = field(
        default=None, metadata={"help": "Tokens of a generated text. Default: 128, at most what positions cover."}
    )
    summary_sentences: int | None = field(
        default=None,
        metadata={"help": "Extractive summarization: sentences to take. Default: the median of the oracle's."},
    )
    label_all_pieces: bool = field(
        default=False, metadata={"help": "Tagging: label every piece of a word, not the first alone."}
    )
    doc_stride: int | None = field(
        default=None,
        metadata={
            "help": "Question answering: tokens that windows of a long context share. Default: 128 if that fits."
        },
    )
    max_answer_length: int = field(default=30, metadata={"help": "Question answering: longest answer in tokens."})
    n_best: int = field(default=20, metadata={"help": "Question answering: starts and ends to combine per window."})
    null_threshold: float = field(
        default=0.0,
        metadata={"help": "Question answering: no answer if its score exceeds the best span's by more than this."},
    )
    objective: str | None = field(
        default=None, metadata={"help": "Language modeling: {objectives}. Default: by the model."}
    )
    value_columns: list[str] = field(
        default_factory=list,
        metadata={"help": "Forecasting: columns of the values. Default: all that hold numbers."},
    )
    time_column: str | None = field(
        default=None,
        metadata={"help": f"Forecasting: column of the times. Default: one named {_listed(names.TIMES)}, if any."},
    )
    context_length: int | None = field(
        default=None, metadata={"help": "Forecasting: steps that the model reads. Default: 96."}
    )
    prediction_length: int | None = field(
        default=None, metadata={"help": "Forecasting: steps that it forecasts. Default: 24."}
    )
    label_length: int | None = field(
        default=None,
        metadata={"help": "Forecasting: last steps of the past that the decoder reads. Default: half of them."},
    )
    season: int | None = field(
        default=None,
        metadata={"help": "Forecasting: the baseline's steps of a season. Default: by the times (24 of hours, ...)."},
    )
    forecast_loss: Literal["mse", "mae", "student_t"] = field(
        default="mse", metadata={"help": "Forecasting: squared or absolute error, or a distribution's log density."}
    )
    forecast_scaling: Literal["window", "fixed", "none"] = field(
        default="window",
        metadata={"help": "Forecasting: values by mean and deviation of each past, of the training rows, or as is."},
    )
    image_column: str | None = field(
        default=None,
        metadata={"help": f"Column of images, or of their paths. Default: one named {_listed(names.IMAGES)}."},
    )
    colors: int | None = field(
        default=None,
        metadata={
            "help": (
                "Image classification with a --variant whose tokens are colors: how many clusters of them. Default:"
                " 512, or as many as the images have."
            )
        },
    )
    augment: list[str] = field(
        default_factory=list,
        metadata={
            "help": (
                "In training, of images: flip (mirror half of them), crop (move them by up to an eighth); of sounds:"
                " time_mask, frequency_mask (hide stretches of them)."
            )
        },
    )
    audio_column: str | None = field(
        default=None,
        metadata={"help": f"Column of sounds, or of their paths. Default: one named {_listed(names.SOUNDS)}."},
    )
    sampling_rate: int | None = field(
        default=None, metadata={"help": "Samples per second of sounds. Default: the model's, or the first sound's."}
    )
    ctc_beams: int = field(
        default=1, metadata={"help": "Speech recognition: beams of the search for a transcript (1: the best path)."}
    )


@dataclass
class RunOptions(LayerwiseOptions, SelfEnsembleOptions, ExpertOptions, Recipe):
    """What belongs to the run besides Trainer's flags."""

    _argument_group_name = "run"

    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better --metric_for_best_model."}
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "How much better an evaluation must be to count."}
    )
    peft: str | None = field(
        default=None,
        metadata={
            "help": (
                "Train few parameters: lora, ia3, prefix, prompt, houlsby, pfeiffer, fusion or k_adapter; fields as"
                " --peft.FIELD VALUE. A fusion weighs trained Pfeiffer adapters: --peft.adapters FOLDER,FOLDER."
            )
        },
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Replace what an earlier run has left in --output_dir."}
    )
