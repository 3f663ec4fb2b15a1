# SPDX-License-Identifier: Apache-2.0
"""Tasks that generate a text from a text: summarization and translation, with an encoder-decoder, or an encoder that
writes by telling masks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...objectives.base import SeededCollator, pad_rows
from ..names import LONG_TEXTS, SUMMARIES
from ..origin import RowNames, columns_of
from .base import Encoded, Task, Trivial, check_columns, text_of, true_answers
from .cloze import ClozeCollator, joined
from .document_context import WithContext, context_columns, document_column, rows_before, sentences_before

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ..options import TaskOptions

USUAL_TARGET_LENGTH = 128


_BREAK = re.compile(r"\n\s*\n")  # between paragraphs


def paragraph_numbers(spans: Sequence[tuple[int, int]], breaks: Sequence[int]) -> list[int]:
    """The paragraph of each token: spans of characters (of special tokens empty), and where paragraphs begin. A
    special token is of the paragraph before it."""
    numbers: list[int] = []
    for start, end in spans:
        now = int(np.searchsorted(breaks, end - 1, side="right")) if end > start else numbers[-1] if numbers else 0
        numbers.append(now)
    return numbers


class WithParagraphs:
    """A collator that pads `sentence_ids` besides what another one does, and leaves them out for a model that reads
    none."""

    def __init__(self, collate: Any, tokenizer: PreTrainedTokenizerBase, wanted: bool) -> None:
        self.collate, self.tokenizer, self.wanted = collate, tokenizer, wanted

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        batch = self.collate([{k: v for k, v in feature.items() if k != "sentence_ids"} for feature in features])
        if self.wanted and "sentence_ids" in features[0]:
            rows = [torch.as_tensor(feature["sentence_ids"]) for feature in features]
            batch["sentence_ids"] = pad_rows(rows, -1, batch["input_ids"].shape[1], self.tokenizer.padding_side)
        return batch


class _Generation(Task):
    head = "Seq2SeqLM"
    mean_loss = False
    generates = True
    text_column: str
    target_column: str

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.max_target_length = options.max_target_length or USUAL_TARGET_LENGTH

    def choose(self, heads: Sequence[str], architecture: str | None) -> None:
        """Takes an encoder-decoder, if the model has one; else an encoder that reads source and target in one row."""
        self.one_row = "ForClozeWriting" in heads and "ForSeq2SeqLM" not in heads
        if self.one_row:
            self.head = "ClozeWriting"  # type: ignore[misc]

    def _texts_of(self, rows: Dataset, column: str, split: str) -> list[str]:
        texts = list(map(text_of, rows[column]))
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                where = RowNames(rows, split)[row]
                raise ValueError(f"{where} has {text!r} in column {column!r}, which is no text; correct the row")
        return texts

    def _settle(self, splits: Mapping[str, Dataset]) -> None:
        self.find_columns(splits["train"])
        check_columns(splits, [self.text_column, self.target_column], optional_in_test=[self.target_column])

    def usual_texts(self, paired: bool) -> tuple[str, str | None]:
        return self.options.source_lang or "source", None

    def columns(self) -> dict[str, Any]:
        found = {"text_column": self.text_column, "target_column": self.target_column}
        return {**found, "max_target_length": self.max_target_length}

    def texts(self, rows: Dataset) -> Iterable[str]:
        return [
            *self._sources(rows, "train"),
            *self._texts_of(rows, self.target_column, "train"),
        ]

    def _sources(self, rows: Dataset, split: str) -> list[str]:
        return self._texts_of(rows, self.text_column, split)

    def _inputs(self, texts: list[str], rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """What the model reads of the texts, as columns."""
        return dict(tokenizer(texts, truncation=True, max_length=self.max_length))

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from datasets import Dataset

        self.tokenizer = tokenizer
        sources = self._sources(rows, split)
        labelled = bool(true_answers(rows, self.target_column, split))
        columns = self._inputs([self.options.prefix + text for text in sources], rows, tokenizer)
        kept = [{"source": text} for text in sources]
        if labelled:
            targets = self._texts_of(rows, self.target_column, split)
            labels = self._targets(targets, tokenizer)
        if self.one_row:
            columns = joined(columns["input_ids"], labels if labelled else None)
        elif labelled:
            columns["labels"] = labels
        columns |= self._beside(rows, columns, split)
        if labelled:
            kept = [{**row, "target": target} for row, target in zip(kept, targets)]
        return Encoded(Dataset.from_dict(columns), kept, labelled)

    def _targets(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        limits = {"truncation": True, "max_length": self.max_target_length}
        if self.one_row:
            end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
            ids = tokenizer(text_target=texts, add_special_tokens=False, **limits)["input_ids"]
        else:
            end, ids = tokenizer.eos_token_id, tokenizer(text_target=texts, **limits)["input_ids"]
        return [self._ended(row, end) for row in ids]

    def _beside(self, rows: Dataset, columns: Mapping[str, Any], split: str) -> dict[str, Any]:
        """Further columns, from those of the texts and the targets."""
        return {}

    def _ended(self, ids: list[int], end: int | None) -> list[int]:
        """A text that was not cut ends with the token at which generation stops."""
        whole = len(ids) < self.max_target_length
        return [*ids, end] if whole and end is not None and ids[-1:] != [end] else ids

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        from transformers import DataCollatorForSeq2Seq

        if self.one_row:
            return ClozeCollator(tokenizer, model.config, seed=seed)
        return DataCollatorForSeq2Seq(tokenizer, model=model)

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        from ...training.evaluation import token_statistics

        kept = [outputs["generated"]] if "generated" in outputs else []
        if inputs.get("labels") is not None:  # the collator names those that are missing, too
            kept.append(token_statistics(outputs["logits"], inputs["labels"], next_token=False))
        return tuple(kept)

    def token_sums(self, kept: Sequence[np.ndarray]) -> np.ndarray | None:
        return kept[-1] if np.issubdtype(kept[-1].dtype, np.floating) else None

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        if np.issubdtype(kept[0].dtype, np.floating):
            return []  # nothing was generated: --predict_with_generate false
        ids = np.where(kept[0] < 0, self.tokenizer.pad_token_id, kept[0])
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        predicted = []
        for row, text in zip(encoded.rows, texts):
            entry = {"source": row["source"], "prediction": text.strip()}
            predicted.append({**entry, "reference": row["target"]} if "target" in row else entry)
        return predicted


class Summarization(_Generation):
    """A text, or several: lists of texts, or texts with empty lines between paragraphs, which a model that reads
    `sentence_ids` is told apart by them. Metric: ROUGE-1, -2, -L, -Lsum."""

    id = "summarization"
    metric = "rougeL"
    metric_names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    percent = True
    reads = ("text_column", "target_column", "max_target_length", "prefix")
    default_length = 512

    def columns_of_text(self) -> list[str]:
        return [*super().columns_of_text(), *LONG_TEXTS, *SUMMARIES]

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        self._settle(splits)

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options = self.options
        self.text_column = self.column(rows, options.text_column, LONG_TEXTS, "text", "text_column")
        usual = [name for name in SUMMARIES if name != self.text_column]
        self.target_column = self.column(rows, options.target_column, usual, "summary", "target_column", answers)

    def _sources(self, rows: Dataset, split: str) -> list[str]:
        """Texts, with an empty line between those of a list. Raises ValueError for a list with none, or an empty
        one."""
        where, found = RowNames(rows, split), []
        for row, text in enumerate(rows[self.text_column]):
            if isinstance(text, list):
                if not text or not all(isinstance(part, str) and part.strip() for part in text):
                    raise ValueError(
                        f"{where[row]} has {text!r} in column {self.text_column!r}; give a text, or a list of texts of"
                        " which none is empty"
                    )
                text = "\n\n".join(text)
            found.append(text)
        return found if all(isinstance(text, str) for text in found) else self._texts_of(rows, self.text_column, split)

    def _inputs(self, texts: list[str], rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        breaks = [[match.end() for match in _BREAK.finditer(text)] for text in texts]
        if not any(breaks) or not tokenizer.is_fast:
            return super()._inputs(texts, rows, tokenizer)
        encoded = tokenizer(texts, truncation=True, max_length=self.max_length, return_offsets_mapping=True)
        spans = encoded.pop("offset_mapping")
        columns = dict(encoded)
        columns["sentence_ids"] = [paragraph_numbers(*pair) for pair in zip(spans, breaks)]
        return columns

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        from .extraction import reads_sentences

        usual = super().collator(tokenizer, model, seed)
        if isinstance(usual, SeededCollator):
            return usual
        return WithParagraphs(usual, tokenizer, reads_sentences(getattr(model, "config", None)))

    def trivial(self, train: Encoded) -> Trivial | None:
        """The first words of the text, as many as a summary has in the middle: what a summary has to beat."""
        words = int(np.median([len(row["target"].split()) for row in train.rows]))
        return Trivial(f"the first {words} words of the text", words)

    def guess(self, answer: Any, row: Mapping[str, Any]) -> Any:
        return " ".join(row["source"].split()[:answer])

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return self.metric_of("rouge", [row["prediction"] for row in rows], [row["reference"] for row in rows])


class Translation(_Generation):
    """Rows are pairs of parallel files, of columns named after the languages, or of a column `translation`. A model
    that reads sentences before is given them, of the same document (`document`, `doc_id`) or else in the order of the
    rows; translations of them are given in training alone. Metric: sacreBLEU."""

    id = "translation"
    divided = False  # whether rows for validation are drawn from those for training
    before = 0  # sentences before a row's own that the model reads
    metric = "bleu"
    metric_names = ("bleu",)
    percent = True
    reads = ("text_column", "target_column", "max_target_length", "prefix", "source_lang", "target_lang")
    default_length = 128

    def load(self, source: Any) -> dict[str, Dataset]:
        from ...data.splitting import check_fraction
        from ..sources import divided, load_rows

        languages = (self.options.source_lang, self.options.target_lang)
        if (languages[0] is None) != (languages[1] is None):
            raise ValueError("--source_lang and --target_lang go together; give both")
        check_fraction(source.validation_fraction)
        texts = [*self.columns_of_text(), *filter(None, languages), "source", "text", "target", "translation"]
        both: Any = None if None in languages else languages
        all_rows: dict[str, Any] = {"validation_fraction": 0.0, "max_train_rows": None, "max_eval_rows": None}
        splits = load_rows(replace(source, **all_rows), both, origins=True, texts=texts)
        for split, rows in splits.items():
            rows = rows.flatten()
            names = {name: name[12:] for name in rows.column_names if name.startswith("translation.")}
            splits[split] = rows.rename_columns(names)
        self.divided = "validation" not in splits
        taken = (self.options.text_column, self.options.target_column)
        return divided(splits, source, document_column(splits["train"], taken))

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        self._settle(splits)

    def read_config(self, config: PreTrainedConfig) -> None:
        self.before = sentences_before(config)

    def _beside(self, rows: Dataset, columns: Mapping[str, Any], split: str) -> dict[str, Any]:
        if not self.before:
            return {}
        taken = (self.text_column, self.target_column)
        if self.divided and split == "validation" and document_column(rows, taken) is None:
            raise ValueError(
                "rows drawn from the data have lost the sentences before them, which this model reads; give held-out"
                " documents with --validation_data, or a column 'document', of which whole ones are held out"
            )
        before = rows_before(rows, self.before, taken, split)
        return context_columns(before, columns["input_ids"], columns.get("labels"))

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        usual, config = super().collator(tokenizer, model, seed), getattr(model, "config", None)
        return WithContext(usual, tokenizer, config) if sentences_before(config) else usual

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options = self.options
        sources = (options.source_lang, "source") if options.source_lang else ("source", "text")
        targets = (options.target_lang, "target") if options.target_lang else ("target", "translation")
        text, target = options.text_column, options.target_column
        if options.source_lang is None and text is None and "source" not in columns_of(rows):
            raise ValueError(
                "say what to translate with --source_lang and --target_lang, or --text_column and --target_column;"
                f" the columns are {columns_of(rows)}"
            )
        self.text_column = self.column(rows, text, sources, "source text", "text_column")
        self.target_column = self.column(rows, target, targets, "translation", "target_column", answers)

    def trivial(self, train: Encoded) -> Trivial | None:
        return Trivial("the text to translate, copied")

    def guess(self, answer: Any, row: Mapping[str, Any]) -> Any:
        return row["source"]

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return self.metric_of("sacrebleu", [row["prediction"] for row in rows], [row["reference"] for row in rows])
