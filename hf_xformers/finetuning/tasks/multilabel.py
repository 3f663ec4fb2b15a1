# SPDX-License-Identifier: Apache-2.0
"""Classification of a text, or of a pair of texts, with any number of labels per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..names import LABEL_LISTS
from ..options import TaskOptions
from ..origin import RowNames
from .base import Encoded, Labels, Trivial, inner_feature, most_frequent
from .classification import WholeText

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

_PROBLEM = "multi_label_classification"


class MultiLabelClassification(WholeText):
    """Every label by itself is there or not (a sigmoid each, binary cross-entropy). Rows hold lists of labels, perhaps
    empty, or text with `label_separator` between them. Metrics: F1 over all decisions (micro), its mean over labels
    (macro), and the accuracy: the share of rows of which every label is right."""

    id = "multi-label-classification"
    metric = "f1_micro"
    metric_names = ("f1_micro", "f1_macro", "accuracy")
    reads = ("text_column", "text_pair_column", "label_column", "label_separator", "label_threshold")
    usual_labels = LABEL_LISTS

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        if not 0 < options.label_threshold < 1:
            raise ValueError(f"--label_threshold {options.label_threshold} is a probability between 0 and 1")
        if options.label_separator == "":
            raise ValueError("--label_separator must be a text such as ';'")

    def columns_of_text(self) -> list[str]:
        return [*super().columns_of_text(), self.options.label_column or "", *LABEL_LISTS]

    def _settle_labels(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        if config is not None and config.problem_type not in (None, _PROBLEM):
            raise ValueError(
                f"the model has a head for {config.problem_type}, which gives a row one answer; take its task, or"
                " train a new head with --new_head"
            )
        train = splits["train"]
        where = RowNames(train, "train")
        pairs = [
            (value, row)
            for row, entry in enumerate(train[self.label_column])
            for value in self._list(entry, where, row)
        ]
        values = [value for value, _ in pairs]
        if not values:
            raise ValueError(
                f"no training row has a label in column {self.label_column!r}; correct --label_column, or give rows"
                " with some"
            )
        feature = inner_feature(train.features[self.label_column])
        self.labels = Labels.of(values, feature, config, "label_column", where, [row for _, row in pairs])

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        self.labels = Labels.saved(config)

    def _list(self, value: Any, where: RowNames, row: int) -> list[Any]:
        """The labels of a row. Raises ValueError for what is neither a list nor text to be cut."""
        separator = self.options.label_separator
        if isinstance(value, (list, tuple)):
            return list(value)
        if separator is not None:
            texts = [] if value is None else [text.strip() for text in str(value).split(separator)]
            return [text for text in texts if text]
        raise ValueError(
            f"{where[row]} has {value!r} in column {self.label_column!r}, and a row of {self.id} has a list of labels;"
            " correct --label_column, give lists (JSONL, Parquet), or say with --label_separator what stands between"
            " labels"
        )

    def _label(self, value: Any, rows: Dataset, where: RowNames, row: int) -> list[float]:
        """1 for the labels that the row has, else 0: numbers, as the loss wants them."""
        present = [0.0] * len(self.labels.names)
        for name in self._list(value, where, row):
            present[
                self.labels.id(name, inner_feature(rows.features[self.label_column]), where, row, "label_column")
            ] = 1.0
        return present

    def class_names(self) -> list[str] | None:
        return self.labels.names

    def config_fields(self) -> dict[str, Any]:
        return {**self.labels.config_fields(), "problem_type": _PROBLEM}

    def predictions(self, kept: Sequence[np.ndarray], encoded: Any) -> list[dict[str, Any]]:
        shares = 1 / (1 + np.exp(-kept[0].astype(np.float64)))
        predicted = []
        for row, chances in zip(encoded.rows, shares):
            texts = {name: value for name, value in row.items() if name != "label"}
            entry = {**texts, "prediction": self._names(chances > self.options.label_threshold)}
            entry["probabilities"] = {
                name: round(float(chance), 6) for name, chance in zip(self.labels.names, chances)
            }
            predicted.append({**entry, "reference": self._names(row["label"])} if "label" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        names = list(most_frequent(tuple(self._names(row["label"])) for row in train.rows))
        return Trivial(f"always {' and '.join(map(repr, names))}" if names else "never a label", names)

    def _names(self, present: Sequence[Any]) -> list[str]:
        return [name for name, there in zip(self.labels.names, present) if there]

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        guess, gold = (
            [[int(name in row[side]) for name in self.labels.names] for row in rows]
            for side in ("prediction", "reference")
        )
        found = {
            f"f1_{average}": self.metric_of("multilabel_f1", guess, gold, average=average)["f1"]
            for average in ("micro", "macro")
        }
        return {**found, **self.metric_of("multilabel_accuracy", guess, gold)}
