# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: which of several texts goes with a first one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..names import CHOICE_LABELS, CHOICE_TEXTS, CHOICES, NUMBERED_CHOICES
from ..origin import RowNames, columns_of
from .base import Encoded, Task, Trivial, check_columns, most_frequent, text_of, true_answers

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class MultipleChoice(Task):
    """The label is the number of the right choice, its letter, or (with choices as a dict of label and text) its
    label. A column `text_pair_column` (SWAG's `sent2`) begins every choice. Metric: accuracy."""

    id = "multiple-choice"
    head = "MultipleChoice"
    metric = "accuracy"
    metric_names = ("accuracy",)
    reads = ("text_column", "text_pair_column", "label_column", "choice_columns")

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        self.find_columns(splits["train"])
        pair = [self.pair_column] if self.pair_column else []
        needed = [self.text_column, *self.choice_columns, self.label_column, *pair]
        check_columns(splits, needed, optional_in_test=[self.label_column])

    def columns_of_text(self) -> list[str]:
        numbered = [f"{word}{number}" for word in NUMBERED_CHOICES for number in range(100)]
        return [*super().columns_of_text(), *CHOICE_TEXTS, *(self.options.choice_columns or numbered)]

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options = self.options
        self.text_column = self.column(rows, options.text_column, CHOICE_TEXTS, "text", "text_column")
        names = columns_of(rows)
        found = (re.fullmatch(rf"(?:{'|'.join(NUMBERED_CHOICES)})(\d+)", name) for name in names)
        numbered = [name[0] for name in sorted(filter(None, found), key=lambda name: int(name[1]))]
        if options.choice_columns:
            for name in options.choice_columns:
                self.column(rows, name, (), "choice", "choice_columns")
            self.choice_columns = list(options.choice_columns)
        elif not numbered or any(name in names for name in CHOICES[:2]):
            self.choice_columns = [self.column(rows, None, CHOICES, "choices", "choice_columns")]
        else:
            self.choice_columns = numbered
        usual = [name for name in CHOICE_LABELS if name not in self.choice_columns]
        self.label_column = self.column(rows, options.label_column, usual, "label", "label_column", answers)
        pair = options.text_pair_column or ("sent2" if "sent2" in names else None)
        self.pair_column = (
            None if pair is None else self.column(rows, pair, (), "start of choices", "text_pair_column")
        )
        self.count = len(self._choices(rows[0], RowNames(rows, "first"), 0)[0])

    def columns(self) -> dict[str, Any]:
        found = {"text_column": self.text_column, "text_pair_column": self.pair_column}
        return {**found, "choice_columns": self.choice_columns, "label_column": self.label_column}

    def _choices(self, row: Mapping[str, Any], where: RowNames, number: int) -> tuple[list[str], list[Any] | None]:
        """(texts, their labels or None) of one row."""
        labels = None
        if len(self.choice_columns) > 1:
            texts: Any = [row[name] for name in self.choice_columns]
        else:
            texts = row[self.choice_columns[0]]
            if isinstance(texts, Mapping) and "text" in texts:
                texts, labels = texts["text"], texts.get("label")
        texts = list(map(text_of, texts)) if isinstance(texts, (list, tuple)) else texts
        if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(t, str) for t in texts):
            raise ValueError(
                f"{where[number]} has the choices {texts!r}; give a list of two texts or more, or a "
                "column for each with --choice_columns"
            )
        begin = f"{row[self.pair_column]} " if self.pair_column and row[self.pair_column] else ""
        return [begin + text for text in texts], labels

    def _label(self, value: Any, labels: Sequence[Any] | None, where: RowNames, number: int) -> int:
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
        named = [str(label) for label in labels or ()]
        if text in named:
            return named.index(text)
        index = int(text) if text.isdecimal() else ord(text) - ord("A") if re.fullmatch("[A-Z]", text) else -1
        if not 0 <= index < self.count:
            raise ValueError(
                f"{where[number]} has the label {value!r}; it must be the number of the right choice, "
                f"0 to {self.count - 1}, or its letter"
            )
        return index

    def texts(self, rows: Dataset) -> Iterable[str]:
        for number, row in enumerate(rows):
            yield str(row[self.text_column])
            yield from self._choices(row, RowNames(rows, "train"), number)[0]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from datasets import Dataset

        given = true_answers(rows, self.label_column, split)
        labelled = bool(given)
        where = RowNames(rows, split)
        firsts: list[str] = []
        seconds: list[str] = []
        kept: list[dict[str, Any]] = []
        labels: list[int] = []
        for number, row in enumerate(rows):
            choices, names = self._choices(row, where, number)  # names: the choices' labels
            if len(choices) != self.count:
                raise ValueError(
                    f"{where[number]} has {len(choices)} choices, and the first training row has "
                    f"{self.count}; give every row the same number"
                )
            if row[self.text_column] is None:
                raise ValueError(f"{where[number]} has no text in column {self.text_column!r}; fill it or remove it")
            firsts += [str(row[self.text_column])] * self.count
            seconds += choices
            kept.append({"text": str(row[self.text_column]), "choices": choices})
            if labelled:
                labels.append(self._label(row[self.label_column], names, where, number))
                kept[-1]["label"] = labels[-1]
        encoded = tokenizer(firsts, seconds, truncation="longest_first", max_length=self.max_length)
        columns: dict[str, Any] = {
            name: [values[index : index + self.count] for index in range(0, len(values), self.count)]
            for name, values in encoded.items()
        }
        if labelled:
            columns["labels"] = labels
        return Encoded(Dataset.from_dict(columns), kept, labelled)

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        from transformers import DataCollatorForMultipleChoice

        return DataCollatorForMultipleChoice(tokenizer)

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        predicted = []
        for row, scores in zip(encoded.rows, kept[0]):
            texts = {"text": row["text"], "choices": row["choices"]}
            entry = {**texts, "prediction": int(scores.argmax()), "scores": [float(score) for score in scores]}
            predicted.append({**entry, "reference": row["label"]} if "label" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        place = most_frequent(row["label"] for row in train.rows)
        return Trivial(f"always choice {place}", place)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        guess, gold = [row["prediction"] for row in rows], [row["reference"] for row in rows]
        return self.metric_of("accuracy", guess, gold)
