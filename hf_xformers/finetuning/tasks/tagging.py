# SPDX-License-Identifier: Apache-2.0
"""Token classification: a tag for every word, such as entities or parts of speech."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..names import TAGS, TAGS_OF_ALIAS, WORDS
from ..origin import RowNames
from .base import Encoded, Labels, Task, Trivial, check_columns, inner_feature, is_hidden, most_frequent, true_answers

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

IGNORE_INDEX = -100
_ENTITY_TAG = re.compile(r"[BIESLU]-.+")


class TokenClassification(Task):
    """A word's tag is read at its first piece. Metrics: entity precision, recall and F1 over all entities where tags
    are of the form `B-PER`, and the accuracy over words. Words beyond `max_length` count as predicted outside (`O`, or
    the first tag where there is none)."""

    id = "token-classification"
    head = "TokenClassification"
    metric = "f1"
    metric_names = ("f1", "precision", "recall", "accuracy")
    reads = ("text_column", "label_column", "label_all_pieces")
    mean_loss = False
    one_class = True
    in_sequence = False  # whether the model's loss is that of sequences of tags
    marks_words = False  # whether the model is told which tokens have a tag (`tag_mask`)

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        rows = splits["train"]
        self.find_columns(rows)
        check_columns(splits, [self.text_column, self.label_column], optional_in_test=[self.label_column])
        feature = inner_feature(rows.features[self.label_column])
        where = RowNames(rows, "train")
        pairs = [
            (tag, row)
            for row, entry in enumerate(rows[self.label_column])
            for tag in self._list(entry, self.label_column, "label_column", where, row)
        ]
        declared = getattr(feature, "names", None)
        tags = [tag for tag, _ in pairs]
        self.labels = Labels.of(tags, feature, config, "label_column", where, [row for _, row in pairs])
        if config is None:  # an entity may continue although no training row has such a one
            known = set(self.labels.names)
            goes_on = {f"I-{name[2:]}" for name in known if name.startswith("B-")} - known
            self.labels = Labels(sorted(known | goes_on)) if goes_on and declared is None else self.labels
        self._read_labels()

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options = self.options
        self.text_column = self.column(rows, options.text_column, WORDS, "words", "text_column")
        first = TAGS_OF_ALIAS.get(options.task.lower(), ())
        usual = [name for name in (*first, *TAGS) if name != self.text_column]
        self.label_column = self.column(rows, options.label_column, usual, "tags", "label_column", answers)

    def usual_texts(self, paired: bool) -> tuple[str, str | None]:
        return WORDS[0], None

    def columns(self) -> dict[str, Any]:
        return {"text_column": self.text_column, "label_column": self.label_column}

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        self.labels = Labels.saved(config)
        self._read_labels()

    def _read_labels(self) -> None:
        self.entities = all(name == "O" or _ENTITY_TAG.fullmatch(name) for name in self.labels.names)
        self.outside = "O" if "O" in self.labels.names else self.labels.names[0]

    @staticmethod
    def _list(entry: Any, column: str, option: str, where: RowNames, row: int) -> list[Any]:
        if not isinstance(entry, list):
            raise ValueError(
                f"{where[row]}: column {column!r} holds {entry!r}, and a row of token-classification has lists of"
                f" words and tags; correct --{option}, or give CoNLL files (.conll) or JSONL with lists"
            )
        return entry

    def texts(self, rows: Dataset) -> Iterable[str]:
        return [" ".join(map(str, words)) for words in self._words(rows, RowNames(rows, "train"))]

    def _words(self, rows: Dataset, where: RowNames) -> list[list[str]]:
        found = []
        for row, entry in enumerate(rows[self.text_column]):
            words = self._list(entry, self.text_column, "text_column", where, row)
            if None in words:
                raise ValueError(
                    f"{where[row]} has a word missing in column {self.text_column!r}: {words!r}; fill it in"
                )
            found.append(list(map(str, words)))
        return found

    def read_config(self, config: PreTrainedConfig) -> None:
        self.in_sequence = getattr(config, "tag_decoder", "softmax") == "crf"
        stack = getattr(config, "stack", None)
        self.marks_words = self.in_sequence or getattr(stack, "exits", "") == "tokens"

    def class_names(self) -> list[str] | None:
        return self.labels.names

    def config_fields(self) -> dict[str, Any]:
        return self.labels.config_fields()

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from datasets import Dataset

        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which does not say what word a piece is of"
            )
        tokenizer.padding_side = "right"  # tags are read from the first token on
        where = RowNames(rows, split)
        words = self._words(rows, where)
        given = true_answers(rows, self.label_column, split)
        labelled = bool(given) and not (
            split == "test" and is_hidden([tag for tags in given for tag in tags or [None]])
        )
        # A byte-level piece of a first word has no space before it, and so another id, unless one is put there.
        texts = [[f" {word}" for word in row] for row in words] if _wants_space(tokenizer) else words
        encoded = tokenizer(texts, is_split_into_words=True, truncation=True, max_length=self.max_length)
        columns = {name: list(values) for name, values in encoded.items()}
        feature = inner_feature(rows.features[self.label_column]) if given else None
        kept: list[dict[str, Any]] = []
        places, all_labels, masks = [], [], []
        for row in range(len(words)):
            ids = encoded.word_ids(row)
            first = [place > 0 and ids[place - 1] == word for place, word in enumerate(ids)]
            first = [word is not None and not again for word, again in zip(ids, first)]
            tagged = [word is not None for word in ids] if self.options.label_all_pieces else first
            masks.append([int(there) for there in tagged])
            places.append([(place, word) for place, (word, start) in enumerate(zip(ids, first)) if start])
            entry: dict[str, Any] = {"tokens": words[row]}
            if labelled:
                tags = self._list(given[row], self.label_column, "label_column", where, row)
                if len(tags) != len(words[row]):
                    raise ValueError(
                        f"{where[row]} has {len(words[row])} words and {len(tags)} tags; every word needs one"
                    )
                known = [self.labels.id(tag, feature, where, row, "label_column") for tag in tags]
                entry["tags"] = [self.labels.names[tag] for tag in known]
                all_labels.append([known[word] if there else IGNORE_INDEX for word, there in zip(ids, tagged)])
            kept.append(entry)
        if labelled:
            columns["labels"] = all_labels
        if self.marks_words:
            columns["tag_mask"] = masks
        return Encoded(Dataset.from_dict(columns), kept, labelled, notes=places)

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        from transformers import DataCollatorForTokenClassification

        plain = DataCollatorForTokenClassification(tokenizer)
        return _WithTagMask(plain) if self.marks_words else plain

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        import torch

        from ...training.evaluation import token_statistics

        logits = outputs["logits"]
        if "labels" not in inputs:
            return (logits.argmax(-1),)
        if self.in_sequence:
            known = inputs["labels"] != IGNORE_INDEX
            right = (logits.argmax(-1) == inputs["labels"]) & known
            count = known.sum(1).float()
            return logits.argmax(-1), torch.stack([count * outputs["loss"].float(), count, right.sum(1).float()], 1)
        return logits.argmax(-1), token_statistics(logits, inputs["labels"], next_token=False)

    def token_sums(self, kept: Sequence[np.ndarray]) -> np.ndarray | None:
        return kept[1] if len(kept) > 1 else None

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        predicted = []
        for index, (row, places) in enumerate(zip(encoded.rows, encoded.notes)):
            tags = [self.outside] * len(row["tokens"])
            for place, word in places:
                tags[word] = self.labels.names[int(kept[0][index, place])]
            entry = {"tokens": row["tokens"], "prediction": tags}
            predicted.append({**entry, "reference": row["tags"]} if "tags" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        tag = most_frequent(tag for row in train.rows for tag in row["tags"])
        return Trivial(f"every word {tag!r}", tag)

    def guess(self, answer: Any, row: Mapping[str, Any]) -> Any:
        return [answer] * len(row["tokens"])

    def f1_name(self) -> str:
        return "entity f1" if self.entities else "macro f1"

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        guess, gold = [row["prediction"] for row in rows], [row["reference"] for row in rows]
        if self.entities:
            found = self.metric_of("seqeval", guess, gold)
            return {name: found[f"overall_{name}"] for name in ("precision", "recall", "f1", "accuracy")}
        ids = {name: index for index, name in enumerate(self.labels.names)}
        flat = [[ids[tag] for row in side for tag in row] for side in (guess, gold)]
        return {**self.metric_of("accuracy", *flat), **self.metric_of("f1", *flat, average="macro")}


class _WithTagMask:
    """A collator of `tag_mask` besides what `plain` makes of the rest of a row."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        import torch

        batch = self.plain([{name: value for name, value in row.items() if name != "tag_mask"} for row in rows])
        masks = torch.zeros(batch["input_ids"].shape, dtype=torch.long)
        for mask, row in zip(masks, rows):
            mask[: len(row["tag_mask"])] = torch.tensor(row["tag_mask"])
        batch["tag_mask"] = masks
        return batch


def _wants_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether pieces inside a text carry the space before them, while pre-split words come without one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    before = getattr(backend, "pre_tokenizer", None)
    if before is None:
        return False
    cut = [piece for piece, _ in before.pre_tokenize_str("a b")]
    alone = [piece for piece, _ in before.pre_tokenize_str("b")]
    return len(cut) == 2 and cut[1] != alone[0] and cut[1].endswith(alone[0])
