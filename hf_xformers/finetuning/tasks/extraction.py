# SPDX-License-Identifier: Apache-2.0
"""Extractive summarization: which sentences of a document are its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.sentences import encode_sentences, numbered, split_sentences
from ...metrics.extractive import greedy_oracle
from ...objectives.base import IGNORE_INDEX, pad_rows
from ..names import LONG_TEXTS, SUMMARIES
from ..origin import RowNames
from .base import Encoded, Task, Trivial, check_columns, true_answers

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ..options import TaskOptions

LONGEST_SENTENCE = 50  # tokens, as in HIBERT


class ExtractiveSummarization(Task):
    """A label for every sentence, at its last token: whether it belongs to the summary. True labels are those of the
    greedy ROUGE oracle; predicted are the sentences with the best scores, as many as the oracle takes in the middle.
    Texts and summaries may be lists of sentences. Metric: ROUGE-1, -2, -L, -Lsum."""

    id = "extractive-summarization"
    head = "TokenClassification"
    metric = "rougeL"
    metric_names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    percent = True
    reads = ("text_column", "target_column", "summary_sentences")
    default_length = 512
    mean_loss = False

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.take = options.summary_sentences
        if self.take is not None and self.take < 1:
            raise ValueError(f"--summary_sentences {self.take} must be at least 1")

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        train = splits["train"]
        self.find_columns(train)
        check_columns(splits, [self.text_column, self.target_column], optional_in_test=[self.target_column])
        if self.take is None:
            documents, summaries = self._documents(train, "train"), self._summaries(train, "train")
            counts = [len(greedy_oracle(*pair)) for pair in zip(documents, summaries)]
            self.take = max(1, round(float(np.median(counts))))

    def columns_of_text(self) -> list[str]:
        return [*super().columns_of_text(), *LONG_TEXTS, *SUMMARIES]

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options = self.options
        texts = ("sentences", *LONG_TEXTS)
        self.text_column = self.column(rows, options.text_column, texts, "document", "text_column")
        usual = tuple(name for name in SUMMARIES if name != self.text_column)
        self.target_column = self.column(rows, options.target_column, usual, "summary", "target_column", answers)

    def usual_texts(self, paired: bool) -> tuple[str, str | None]:
        return "document", None

    def columns(self) -> dict[str, Any]:
        found = {"text_column": self.text_column, "target_column": self.target_column}
        return {**found, "summary_sentences": self.take}

    def facts(self) -> dict[str, Any]:
        return {"sentences": self.take}

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        self.take = self.take or int(facts.get("sentences", 3))

    def config_fields(self) -> dict[str, Any]:
        return {"id2label": {0: "leave", 1: "take"}, "label2id": {"leave": 0, "take": 1}}

    def _documents(self, rows: Dataset, split: str) -> list[list[str]]:
        """The sentences of every row. Raises ValueError for a document without any, or with one that is empty."""
        where, found = RowNames(rows, split), []
        for row, document in enumerate(rows[self.text_column]):
            if isinstance(document, str):
                sentences = split_sentences(document)
            elif isinstance(document, list) and all(isinstance(sentence, str) for sentence in document):
                sentences = document
            else:
                raise ValueError(
                    f"{where[row]} has {document!r} in column {self.text_column!r}; give a text, or a list of"
                    " sentences"
                )
            if not sentences:
                raise ValueError(
                    f"{where[row]} has no sentence in column {self.text_column!r}; give it text, or remove the row"
                )
            blank = next((index for index, sentence in enumerate(sentences) if not sentence.strip()), None)
            if blank is not None:
                raise ValueError(
                    f"{where[row]}: sentence {blank} of column {self.text_column!r} is empty; fill it in or leave"
                    " it out"
                )
            found.append(list(sentences))
        return found

    def _summaries(self, rows: Dataset, split: str) -> list[str]:
        where, found = RowNames(rows, split), []
        for row, summary in enumerate(rows[self.target_column]):
            text = "\n".join(summary) if isinstance(summary, list) and all(map(_is_text, summary)) else summary
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"{where[row]} has {summary!r} in column {self.target_column!r}, which is no summary; correct the"
                    " row"
                )
            found.append(text)
        return found

    def texts(self, rows: Dataset) -> Iterable[str]:
        return [" ".join(sentences) for sentences in self._documents(rows, "train")]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from datasets import Dataset

        tokenizer.padding_side = "right"  # scores are read from the first token on
        documents = self._documents(rows, split)
        labelled = bool(true_answers(rows, self.target_column, split))
        summaries = self._summaries(rows, split) if labelled else []
        encoded = encode_sentences(documents, tokenizer, min(LONGEST_SENTENCE, self.max_length))
        where = RowNames(rows, split)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "sentence_ids": []}
        kept: list[dict[str, Any]] = []
        ends: list[list[int]] = []
        for row, (sentences, ids) in enumerate(zip(documents, encoded)):
            empty = next((index for index, sentence in enumerate(ids) if not sentence), None)
            if empty is not None:
                raise ValueError(
                    f"{where[row]}: sentence {empty} ({sentences[empty]!r}) has no token for this tokenizer; leave it"
                    " out"
                )
            sizes = np.cumsum([len(sentence) for sentence in ids])
            fitting = max(1, int((sizes <= self.max_length).sum()))  # whole sentences, from the first
            for name, values in numbered(ids[:fitting]).items():
                columns[name].append(values)
            ends.append([int(size) - 1 for size in sizes[:fitting]])
            kept.append({"sentences": sentences})
            if labelled:
                kept[-1]["summary"] = summaries[row]
        if labelled:
            columns["labels"] = []
            for entry, places, tokens in zip(kept, ends, columns["input_ids"]):
                oracle = set(greedy_oracle(entry["sentences"][: len(places)], entry["summary"]))
                labels = [IGNORE_INDEX] * len(tokens)
                for index, place in enumerate(places):
                    labels[place] = int(index in oracle)
                columns["labels"].append(labels)
        return Encoded(Dataset.from_dict(columns), kept, labelled, notes=ends)

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        return SentenceCollator(tokenizer, reads_sentences(model.config))

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        from ...training.evaluation import token_statistics

        logits = outputs["logits"]
        scores = (logits[..., 1] - logits[..., 0]).float()
        if "labels" not in inputs:
            return (scores,)
        return scores, token_statistics(logits, inputs["labels"], next_token=False)

    def token_sums(self, kept: Sequence[np.ndarray]) -> np.ndarray | None:
        return kept[1] if len(kept) > 1 else None

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        predicted = []
        for row, places, scores in zip(encoded.rows, encoded.notes, kept[0]):
            order = np.argsort(-scores[places], kind="stable")[: self.take]
            chosen = sorted(int(index) for index in order)
            entry = {"prediction": "\n".join(row["sentences"][index] for index in chosen), "chosen": chosen}
            predicted.append({**entry, "reference": row["summary"]} if "summary" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        return Trivial(f"the first {self.take} sentence{'s' * (self.take != 1)}", self.take)

    def guess(self, answer: Any, row: Mapping[str, Any]) -> Any:
        return "\n".join(row["sentences"][:answer])

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return self.metric_of("rouge", [row["prediction"] for row in rows], [row["reference"] for row in rows])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def reads_sentences(config: Any) -> bool:
    """Whether a model of this configuration takes `sentence_ids`."""
    from ...configuration_xformer import XFormerConfig
    from ...modeling_tower import XFormerTower

    return isinstance(config, XFormerConfig) and "sentence_ids" in XFormerTower.names_of_inputs(config)


class SentenceCollator:
    """Pads rows of `input_ids`, `sentence_ids` and `labels` on the right; a model that reads no sentences is not given
    their numbers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sentences: bool) -> None:
        self.tokenizer, self.sentences = tokenizer, sentences

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        width = max(len(feature["input_ids"]) for feature in features)
        fill = {"input_ids": self.tokenizer.pad_token_id or 0, "labels": IGNORE_INDEX}
        if self.sentences:
            fill["sentence_ids"] = -1
        batch = {
            name: pad_rows([torch.as_tensor(feature[name]) for feature in features], value, width)
            for name, value in fill.items()
            if name in features[0]
        }
        ones = [torch.ones(len(feature["input_ids"]), dtype=torch.long) for feature in features]
        batch["attention_mask"] = pad_rows(ones, 0, width)
        return batch
