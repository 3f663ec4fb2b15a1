# SPDX-License-Identifier: Apache-2.0
"""What every task shares: its contract, finding columns, and class labels that agree with a saved model's."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...metrics import compute, is_error, require_packages
from ..origin import RowNames, columns_of

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ...configuration_xformer import XFormerConfig
    from ..options import TaskData, TaskOptions


@dataclass
class Encoded:
    """A split ready for the model.

    features: what the collator gets, row by row. rows: what is predicted, row by row (a long context has several
    features). labeled: whether rows have a true answer. notes: what the task needs to come back from features to
    rows.
    """

    features: Dataset
    rows: Sequence[Mapping[str, Any]]
    labelled: bool = True
    notes: Any = None


@dataclass
class Trivial:
    """What can be said without a model: the trivial baseline of a result.

    rule: in words. answer: what `Task.guess` needs besides the row, as JSON can hold it.
    """

    rule: str
    answer: Any = None


class Task:
    """Base of the tasks. In order: `load`, `settle` (or `restore` for a model that is trained), `texts`,
    `config_fields`, `encode`, `collator`, and after the model has run `reduce`, `predictions`, `score`."""

    id: ClassVar[str]
    head: ClassVar[str]  # as in For<head>
    metric: ClassVar[str]  # which of `metric_names` chooses the best checkpoint
    metric_names: ClassVar[tuple[str, ...]]
    less_is_better: ClassVar[bool] = False  # whether that metric is an error; `metrics.is_error` knows the usual ones
    percent: ClassVar[bool] = False  # whether that metric ends at 100, and not at 1
    default_length: ClassVar[int] = 256
    mean_loss: ClassVar[bool] = True  # the head's loss is a mean over rows, whatever the number of tokens in the step
    generates: ClassVar[bool] = False
    one_class: ClassVar[bool] = False  # an example (a row or a token) is of one of `labels`
    predicts: ClassVar[bool] = True  # says something of every row
    reads_text: ClassVar[bool] = True  # its rows go through a tokenizer
    row_files: ClassVar[tuple[str, ...]] = ()  # endings of files that are rows by themselves
    reads: ClassVar[tuple[str, ...]]  # the options that mean something to it, besides those of every task
    unit: tuple[float, float] = (0.0, 1.0)  # of labels that are numbers: mean and spread of the training rows
    one_row: bool = False  # what is generated stands behind what is read, and both share the positions

    def __init__(self, options: TaskOptions) -> None:
        require_packages()
        self.options = options
        for name in ("max_length", "max_target_length", "max_answer_length", "n_best"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if not 0.0 <= options.class_balance <= 1.0:
            raise ValueError(
                f"--class_balance {options.class_balance} must be between 0 (every example counts alike) and 1 (every"
                " class)"
            )
        if options.class_balance and not self.one_class:
            raise ValueError(
                f"--class_balance weighs classes of which each example has one, and {self.id} has none; leave it out"
            )
        self.max_length = self.default_length if options.max_length is None else options.max_length

    @classmethod
    def is_error(cls, metric: str) -> bool:
        """Whether less of a metric, with or without `eval_`, is better."""
        return is_error(metric) or (cls.less_is_better and metric.removeprefix("eval_") == cls.metric)

    # ------------------------------------------------------------------------------------------------ before the model

    def choose(self, heads: Sequence[str], architecture: str | None) -> None:
        """Decides what depends on the model's heads (`For...`) and on the class that it was saved as."""

    @classmethod
    def serves(cls, config_class: type[PreTrainedConfig]) -> bool:
        """Whether models with such configurations do the task in this way, where there are several of one id."""
        return True

    def load(self, source: TaskData) -> dict[str, Dataset]:
        """The splits of the source, with the source's columns and the origins of its rows."""
        from ..sources import load_rows

        return load_rows(source, origins=True, texts=self.columns_of_text())

    def columns_of_text(self) -> list[str]:
        """Columns, by the options or by their usual names, whose fields in tables are texts, as "02100" or "3.50"."""
        options = self.options
        return [name for name in (options.text_column, options.text_pair_column, options.target_column) if name]

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        """Finds columns and labels. config: the saved model's, if it has this task's head already."""
        raise NotImplementedError

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        """Finds the columns by the options or by their usual names. answers: whether that of the true answers must be
        there."""
        raise NotImplementedError

    def columns(self) -> dict[str, Any]:
        """The columns found, as the options that name them."""
        return {}

    def usual_texts(self, paired: bool) -> tuple[str, str | None]:
        """Columns for texts that come without any: of the first, and of the second if rows are pairs of texts.

        Raises ValueError where rows are more than texts.
        """
        raise ValueError(f"rows of {self.id} are more than a text; give a file of them")

    def of_files(self, paths: Sequence[str]) -> Dataset:
        """The rows of files that end as `row_files` says."""
        raise NotImplementedError

    def class_names(self) -> list[str] | None:
        """The classes in the order of their ids, once `settle` or `restore` has found them; None: the task has
        none."""
        return None

    def f1_name(self) -> str:
        """What the metric `f1` is of, or how it is averaged."""
        return "f1"

    def facts(self) -> dict[str, Any]:
        """What else `settle` learnt from training rows, as JSON can hold it, for `restore`."""
        return {}

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        """Labels and the like of a trained model, in place of `settle`. facts: what the run recorded."""

    def recorded(self) -> dict[str, Any]:
        """The options under which the same task reads another file in the same way."""
        given = {**asdict(self.options), "task": self.id, "max_length": self.max_length, **self.columns()}
        return {name: value for name, value in given.items() if value is not None}

    def texts(self, rows: Dataset) -> Iterable[str]:
        """Texts to train a tokenizer on."""
        raise NotImplementedError

    def config_fields(self) -> dict[str, Any]:
        """Configuration fields that the task decides."""
        return {}

    def read_config(self, config: PreTrainedConfig) -> None:
        """Learns from the model's configuration what its rows need besides the task's own, before they are encoded."""

    def open_processor(self, splits: Mapping[str, Dataset], saved: str | None, seed: int) -> None:
        """Where it decides the configuration, too: what [`Task.processor`] gives, from training rows or of a saved
        model."""

    def decided_fields(
        self, config_class: type[XFormerConfig], components: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Components and fields of a model with fresh weights, from those given and what rows decide."""
        return dict(components), dict(fields)

    def processor(self, config: PreTrainedConfig, saved: str | None) -> Any:
        """Where rows are no texts: what makes inputs of them in a tokenizer's place, and is saved with the model; None
        where the task does so itself. saved: folder or Hub id of a trained model."""
        return None

    def extent(self) -> str:
        """How large a row's input is, in words."""
        return f"of up to {self.max_length} tokens"

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        raise NotImplementedError

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(tokenizer)

    # ------------------------------------------------------------------------------------------------ after the model

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        """What is kept of a batch's outputs, rows first: little enough to hold for a whole split."""
        return (outputs["logits"],)

    def token_sums(self, kept: Sequence[np.ndarray]) -> np.ndarray | None:
        """Of what was kept, the rows of `token_statistics` [N, 3], for an exact loss; None where the loss is per
        row."""
        return None

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        """For every row what the model says (`prediction`), with the true answer (`reference`) where there is one."""
        raise NotImplementedError

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The metrics of predicted rows."""
        raise NotImplementedError

    def trivial(self, train: Encoded) -> Trivial | None:
        """The best that can be said without reading a row, by the training rows; None where there is no such thing."""
        return None

    def guess(self, answer: Any, row: Mapping[str, Any]) -> Any:
        """The trivial prediction for a row of `Encoded.rows`."""
        return answer

    def baseline(self, trivial: Trivial, predicted: Sequence[Mapping[str, Any]], encoded: Encoded) -> dict[str, float]:
        """The metrics of the trivial predictions on the rows that were predicted."""
        guessed = [
            {**row, "prediction": self.guess(trivial.answer, given)} for row, given in zip(predicted, encoded.rows)
        ]
        return self.score(guessed)

    # ---------------------------------------------------------------------------------------------- for the subclasses

    @staticmethod
    def metric_of(name: str, predictions: Sequence[Any], references: Sequence[Any], **extra: Any) -> dict[str, float]:
        """The figures of a metric by its name, as `hf_xformers.metrics.compute` gives them."""
        return compute(name, predictions, references, **extra)

    def column(
        self, rows: Dataset, wanted: str | None, usual: Sequence[str], what: str, option: str, required: bool = True
    ) -> str:
        """The column that the user named, or the first of the usual names that is there; if it need not be there, the
        name that it would have.

        Raises ValueError that lists the columns and names the option.
        """
        names = columns_of(rows)
        if not required and (wanted or next((name for name in usual if name in names), None)) not in names:
            return wanted or usual[0]
        if wanted is not None:
            if wanted not in names:
                raise ValueError(
                    f"there is no column {wanted!r} for {what}; the columns are {names}; correct --{option}"
                )
            return wanted
        found = next((name for name in usual if name in names), None)
        if found is None:
            raise ValueError(
                f"no column is the {what} of task {self.id} by its name ({', '.join(usual)}); the columns are {names}:"
                f" name one with --{option}, or the columns of a CSV file without a header line with --column_names"
            )
        return found


def check_columns(splits: Mapping[str, Dataset], columns: Iterable[str], optional_in_test: Iterable[str] = ()) -> None:
    """Refuses a split that lacks a column which the training rows have; the test split may lack the answers."""
    spared = set(optional_in_test)
    for split, rows in splits.items():
        for name in columns:
            if name not in rows.column_names and not (split == "test" and name in spared):
                raise ValueError(
                    f"the {split} split has no column {name!r}, which the training rows have; its columns are "
                    f"{columns_of(rows)}"
                )


class Labels:
    """Class labels: their names in the order of their ids, and a value of the data as an id."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._ids = {name: index for index, name in enumerate(self.names)}

    @classmethod
    def of(
        cls,
        values: Iterable[Any],
        feature: Any,
        config: PreTrainedConfig | None,
        option: str,
        where: RowNames,
        rows: Iterable[int] | None = None,
    ) -> Labels:
        """The labels of the training rows: those of the saved head where there is one, else those of a Hub feature,
        else those that occur, sorted.

        where, rows: what the rows are called, and which of them each value is of; default: the values in their order.

        Raises ValueError for a label that the saved head does not know, and for fewer than two labels.
        """
        declared = getattr(feature, "names", None)
        numbers = itertools.count() if rows is None else rows
        found = {label_name(value, declared, option, where, row) for value, row in zip(values, numbers)}
        if config is None:
            names = list(declared) if declared else sorted(found, key=lambda name: (*_number_first(name), name))
            if len(names) < 2:
                raise ValueError(f"the training rows have the one label {names[0]!r}; a classifier needs two or more")
            return cls(names)
        saved = cls.saved(config).names
        unknown = sorted(found - set(saved))
        if unknown:
            raise ValueError(
                f"the data has the label {unknown[0]!r}, which the model's config does not know (it has "
                f"{', '.join(saved)}); correct the data, or train a new head with --new_head"
            )
        return cls(saved)

    @classmethod
    def saved(cls, config: PreTrainedConfig) -> Labels:
        """The labels of a saved head."""
        names = [str(name) for _, name in sorted((config.id2label or {}).items())]
        if all(re.fullmatch(r"LABEL_\d+", name) for name in names):  # ids without names, as transformers fills them in
            names = [str(index) for index in range(len(names))]
        return cls(names)

    def id(self, value: Any, feature: Any, where: RowNames, row: int, option: str) -> int:
        name = label_name(value, getattr(feature, "names", None), option, where, row)
        if name not in self._ids:
            raise ValueError(
                f"{where[row]} has the label {name!r}, which the training rows do not have "
                f"({', '.join(self.names)}); correct the label, or add training rows of it"
            )
        return self._ids[name]

    def config_fields(self) -> dict[str, Any]:
        """num_labels follows from id2label."""
        return {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
        }


def label_name(value: Any, declared: Sequence[str] | None, option: str, where: RowNames, row: int) -> str:
    """A label of the data as text: the name of a Hub label, 1 and 1.0 as '1'. Raises ValueError for what is no
    label."""
    if value is None or value != value or not str(value).strip():
        raise ValueError(
            f"{where[row]} has no label ({value!r} is no class label); fill it in or remove the row, or correct"
            f" --{option}"
        )
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(
            f"{where[row]} has the label {value!r}, and {value!r} is no class label; correct --{option}, or take"
            " --task regression if the labels are measurements"
        )
    if isinstance(value, (list, dict)):
        raise ValueError(
            f"{where[row]} has {value!r}, which is no single class label; correct --{option}, or take --task"
            " multi-label-classification for rows with lists of labels"
        )
    if declared is not None and isinstance(value, int):
        return declared[value] if 0 <= value < len(declared) else str(value)
    return str(int(value)) if isinstance(value, (bool, float)) else str(value).strip()


def text_of(value: Any) -> Any:
    """A value of a column of text: where all of a CSV's are digits, it holds numbers."""
    return str(value) if isinstance(value, int) else value


def inner_feature(feature: Any) -> Any:
    """The feature of the entries of a list column."""
    return getattr(feature, "feature", feature)


def true_answers(rows: Dataset, column: str, split: str) -> list[Any]:
    """The answers of rows; none where the column is not there, or a test split keeps them back."""
    given = list(rows[column]) if column in rows.column_names else []
    return [] if split == "test" and is_hidden(given) else given


def is_hidden(values: Sequence[Any]) -> bool:
    """Whether a test split keeps its answers back: all are missing, or -1 as in GLUE. A list without labels is one."""
    return all(value is None or value == -1 or value == "" for value in values)


def most_frequent(values: Iterable[Any]) -> Any:
    """The value that occurs most, of equal counts the first by its text; None where there is none."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], str(value))) if counts else None


def _number_first(name: str) -> tuple[int, float]:
    try:
        number = float(name)
    except ValueError:
        return (1, 0.0)
    return (0, number) if number == number else (1, 0.0)  # "nan" has no place among numbers


def plain_rows(rows: Dataset, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows as dicts of the given columns that are there."""
    kept = [name for name in columns if name in rows.column_names]
    table = {name: list(rows[name]) for name in kept}
    return [{name: table[name][index] for name in kept} for index in range(len(rows))]
