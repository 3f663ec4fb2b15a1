# SPDX-License-Identifier: Apache-2.0
"""Classification and regression of a text, or of a pair of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..label_unit import unit_of
from ..names import CLASS_LABELS, NUMBER_LABELS, TEXT_PAIRS
from ..origin import RowNames, columns_of
from .base import Encoded, Labels, Task, Trivial, check_columns, most_frequent, plain_rows, true_answers

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class WholeText(Task):
    """Base of the tasks that say one thing of a whole text, or of a pair of texts."""

    head = "SequenceClassification"
    usual_labels: ClassVar[tuple[str, ...]] = CLASS_LABELS

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        self.find_columns(splits["train"])
        check_columns(splits, [*self.text_columns, self.label_column], optional_in_test=[self.label_column])
        self._settle_labels(splits, config)

    def columns_of_text(self) -> list[str]:
        return [*super().columns_of_text(), *TEXT_PAIRS, *filter(None, TEXT_PAIRS.values())]

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options = self.options
        self.label_column = self.column(
            rows, options.label_column, self.usual_labels, "label", "label_column", answers
        )
        others = [name for name in TEXT_PAIRS if name != self.label_column]
        self.text_column = self.column(rows, options.text_column, others, "text", "text_column")
        pair = options.text_pair_column
        if pair is not None:
            self.column(rows, pair, (), "second text", "text_pair_column")
        elif options.text_column is None and TEXT_PAIRS[self.text_column] in columns_of(rows):
            pair = TEXT_PAIRS[self.text_column]
        self.text_columns = [self.text_column, *([pair] if pair else [])]

    def usual_texts(self, paired: bool) -> tuple[str, str | None]:
        return ("sentence1", "sentence2") if paired else ("text", None)

    def columns(self) -> dict[str, Any]:
        pair = self.text_columns[1] if len(self.text_columns) > 1 else None
        return {"text_column": self.text_column, "text_pair_column": pair, "label_column": self.label_column}

    def _settle_labels(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        raise NotImplementedError

    def _label(self, value: Any, rows: Dataset, where: RowNames, row: int) -> Any:
        raise NotImplementedError

    def texts(self, rows: Dataset) -> Iterable[str]:
        return [str(text) for name in self.text_columns for text in rows[name] if text is not None]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from datasets import Dataset

        where = RowNames(rows, split)
        for name in self.text_columns:
            if None in rows[name]:
                row = list(rows[name]).index(None)
                raise ValueError(f"{where[row]} has no text in column {name!r}; fill it or remove it")
            for row, text in enumerate(rows[name]):
                if isinstance(text, (dict, list)):
                    raise ValueError(
                        f"{where[row]} has {text!r} in column {name!r}, which is no text; correct the row"
                    )
        texts = [[str(text) for text in rows[name]] for name in self.text_columns]
        columns = dict(tokenizer(*texts, truncation=True, max_length=self.max_length))
        given = true_answers(rows, self.label_column, split)
        labelled = bool(given)
        kept = plain_rows(rows, self.text_columns)
        if labelled:
            columns["labels"] = [self._label(value, rows, where, row) for row, value in enumerate(given)]
            kept = [{**row, "label": label} for row, label in zip(kept, columns["labels"])]
        return Encoded(Dataset.from_dict(columns), kept, labelled)


class OneClass(Task):
    """What tasks share that give each row one of several classes, `labels`. Metrics: accuracy, F1 (of class 1 of two;
    else the mean over classes), Matthews."""

    metric = "accuracy"
    metric_names = ("accuracy", "f1", "matthews_correlation")
    one_class = True
    labels: Labels

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        self.labels = Labels.saved(config)

    def class_names(self) -> list[str] | None:
        return self.labels.names

    def f1_name(self) -> str:
        return f"f1 of {self.labels.names[1]!r}" if len(self.labels.names) == 2 else "macro f1"

    def config_fields(self) -> dict[str, Any]:
        return {**self.labels.config_fields(), "problem_type": "single_label_classification"}

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        logits = kept[0].astype(np.float64)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        predicted = []
        for row, chances in zip(encoded.rows, shares):
            best = int(chances.argmax())
            texts = {name: value for name, value in row.items() if name != "label"}
            entry = {**texts, "prediction": self.labels.names[best], "probability": round(float(chances[best]), 6)}
            entry["probabilities"] = {name: round(float(p), 6) for name, p in zip(self.labels.names, chances)}
            predicted.append({**entry, "reference": self.labels.names[row["label"]]} if "label" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        name = most_frequent(self.labels.names[row["label"]] for row in train.rows)
        return Trivial(f"always {name!r}", name)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        ids = {name: index for index, name in enumerate(self.labels.names)}
        guess, gold = ([ids[row[side]] for row in rows] for side in ("prediction", "reference"))
        average = "binary" if len(ids) == 2 else "macro"
        return {
            **self.metric_of("accuracy", guess, gold),
            **self.metric_of("f1", guess, gold, average=average),
            **self.metric_of("matthews_correlation", guess, gold),
        }


class TextClassification(OneClass, WholeText):
    """One of several classes. Metrics: accuracy, F1 (of class 1 of two; else the mean over classes), Matthews."""

    id = "text-classification"
    reads = ("text_column", "text_pair_column", "label_column")

    def _settle_labels(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        if config is not None and config.problem_type == "multi_label_classification":
            raise ValueError(
                "the model has a head for any number of labels per row, and text-classification gives each row one;"
                " take --task multi-label-classification, or train a new head with --new_head"
            )
        train = splits["train"]
        feature = train.features[self.label_column]
        where = RowNames(train, "train")
        self.labels = Labels.of(train[self.label_column], feature, config, "label_column", where)

    def _label(self, value: Any, rows: Dataset, where: RowNames, row: int) -> int:
        return self.labels.id(value, rows.features[self.label_column], where, row, "label_column")


class Regression(WholeText):
    """A number. Metrics: Pearson and Spearman correlation, mean squared error."""

    id = "regression"
    metric = "pearsonr"
    metric_names = ("pearsonr", "spearmanr", "mse")
    reads = ("text_column", "text_pair_column", "label_column")
    usual_labels = NUMBER_LABELS

    def _settle_labels(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        if config is not None and config.num_labels != 1:
            raise ValueError(
                f"the model has a head of {config.num_labels} labels, and a regression has one; train a new head with "
                "--new_head"
            )

    def _label(self, value: Any, rows: Dataset, where: RowNames, row: int) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not np.isfinite(number):
            raise ValueError(
                f"{where[row]} has the label {value!r}, which is no number; correct it, or take --task "
                "text-classification"
            )
        return number

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        encoded = super().encode(rows, tokenizer, split)
        if split == "train":
            self.unit = unit_of(encoded.features["labels"])
        return encoded

    def config_fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        predicted = []
        for row, value in zip(encoded.rows, kept[0].reshape(len(encoded.rows), -1)[:, 0]):
            entry = {**{k: v for k, v in row.items() if k != "label"}, "prediction": float(value)}
            predicted.append({**entry, "reference": row["label"]} if "label" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        mean = float(np.mean([row["label"] for row in train.rows]))
        return Trivial(f"always the mean label, {mean:.4g}", mean)

    def baseline(self, trivial: Trivial, predicted: Sequence[Mapping[str, Any]], encoded: Encoded) -> dict[str, float]:
        """Of a constant only the squared error: it correlates with nothing."""
        gold = [row["reference"] for row in predicted]
        return dict(self.metric_of("mse", [trivial.answer] * len(gold), gold))

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        guess, gold = [row["prediction"] for row in rows], [row["reference"] for row in rows]
        return {
            key: value
            for name in ("pearsonr", "spearmanr", "mse")
            for key, value in self.metric_of(name, guess, gold).items()
        }
