# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering: the span of a context that answers a question, with windows over long contexts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..names import ANSWERS, CONTEXTS, QUESTIONS
from ..origin import RowNames, columns_of
from .base import Encoded, Task, Trivial, check_columns, text_of, true_answers

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

LONGEST_QUESTION = 64
USUAL_STRIDE = 128


@dataclass(frozen=True)
class Window:
    """A part of a row's context as the model reads it: spans [T, 2] of characters, (-1, -1) outside the context."""

    row: int
    spans: np.ndarray


class QuestionAnswering(Task):
    """Windows of a context share `doc_stride` tokens, and the best span of all of a row's windows is its answer. Where
    training rows without an answer exist, none may be predicted, and SQuAD 2's rules score. Metrics: exact match,
    F1."""

    id = "question-answering"
    head = "QuestionAnswering"
    metric = "f1"
    metric_names = ("f1", "exact_match")
    percent = True
    reads = (
        "text_column",
        "text_pair_column",
        "label_column",
        "doc_stride",
        "max_answer_length",
        "n_best",
        "null_threshold",
    )
    default_length = 384

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        rows = splits["train"]
        self.find_columns(rows)
        needed = [self.question_column, self.context_column, self.label_column]
        check_columns(splits, needed, optional_in_test=[self.label_column])
        where = RowNames(rows, "train")
        answers = (self._answers(rows, row, entry, where)[0] for row, entry in enumerate(rows[self.label_column]))
        self.no_answer = any(not texts for texts in answers)

    def columns_of_text(self) -> list[str]:
        return [*super().columns_of_text(), self.options.label_column or "", *QUESTIONS, *CONTEXTS, *ANSWERS]

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        options, context = self.options, self.options.text_pair_column
        self.question_column = self.column(rows, options.text_column, QUESTIONS, "question", "text_column")
        self.context_column = self.column(rows, context, CONTEXTS, "context", "text_pair_column")
        self.label_column = self.column(rows, options.label_column, ANSWERS, "answers", "label_column", answers)

    def usual_texts(self, paired: bool) -> tuple[str, str | None]:
        return QUESTIONS[0], CONTEXTS[0]

    def columns(self) -> dict[str, Any]:
        found = {"text_column": self.question_column, "text_pair_column": self.context_column}
        return {**found, "label_column": self.label_column}

    def facts(self) -> dict[str, Any]:
        return {"no_answer": self.no_answer}

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        self.no_answer = bool(facts.get("no_answer", False))

    def texts(self, rows: Dataset) -> Iterable[str]:
        return [str(text) for name in (self.question_column, self.context_column) for text in rows[name]]

    def _answers(self, rows: Dataset, row: int, entry: Any, where: RowNames) -> tuple[list[str], list[Any]]:
        """(texts, where they start or None) of one row: SQuAD's dict of lists, a list of texts, or one text."""
        starts: Any = None
        if isinstance(entry, Mapping):
            entry, starts = entry.get("text"), entry.get("answer_start")
        elif "answer_start" in columns_of(rows):
            starts = rows[row]["answer_start"]
        texts = entry if isinstance(entry, list) else [] if entry is None else [entry]
        texts = list(map(text_of, texts))
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{where[row]} has the answers {entry!r}; give a text, a list of texts, or "
                "{'text': [...], 'answer_start': [...]} in column " + repr(self.label_column)
            )
        starts = starts if isinstance(starts, list) else [starts]
        pairs = zip(texts, starts if len(starts) >= len(texts) else [None] * len(texts))
        kept = [(text, start) for text, start in pairs if text.strip()]
        return [text for text, _ in kept], [start for _, start in kept]

    def _span(self, context: str, text: str, start: float | None, where: RowNames, row: int) -> tuple[int, int]:
        start = context.find(text) if start is None or start < 0 else int(start)  # a float next to rows without one
        if start < 0 or context[start : start + len(text)] != text:
            raise ValueError(
                f"{where[row]} has the answer {text!r}, which does not stand in its context at the "
                "character that answer_start says; correct the row"
            )
        return start, start + len(text)

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from datasets import Dataset

        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which does not say where a token stands"
            )
        tokenizer.padding_side = "right"  # windows are read from their first token on
        where = RowNames(rows, split)
        given = true_answers(rows, self.label_column, split)
        answers = [self._answers(rows, row, entry, where) for row, entry in enumerate(given)]
        # No row of a test split has an answer: they are kept back, unless questions may have none.
        labelled = bool(given) and (split != "test" or self.no_answer or any(texts for texts, _ in answers))
        kept: list[dict[str, Any]] = []
        spans: list[tuple[int, int] | None] = []
        for row in range(len(rows)):
            entry = rows[row]
            for name in (self.question_column, self.context_column):
                if not isinstance(entry[name], str) or not entry[name].strip():
                    raise ValueError(f"{where[row]} has no text in column {name!r}; fill it or remove the row")
            question, context = entry[self.question_column].strip(), entry[self.context_column]
            kept.append({"question": question, "context": context})
            if labelled:
                texts, starts = answers[row]
                found = [self._span(context, text, start, where, row) for text, start in zip(texts, starts)]
                kept[-1]["answers"] = texts
                spans.append(found[0] if found else None)
        questions = self._cut_questions([row["question"] for row in kept], tokenizer)
        encoded = tokenizer(
            questions,
            [row["context"] for row in kept],
            truncation="only_second",
            max_length=self.max_length,
            stride=self._stride(questions, tokenizer),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        of_row, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        columns = {name: list(values) for name, values in encoded.items()}
        windows, starts, ends = [], [], []
        for index, row in enumerate(of_row):
            inside = np.array([part == 1 for part in encoded.sequence_ids(index)])
            window = Window(row, _without_space(np.array(offsets[index]), inside, kept[row]["context"]))
            windows.append(window)
            if labelled:
                start, end = place_of(window, spans[row])
                starts.append(start)
                ends.append(end)
        if labelled:
            columns |= {"start_positions": starts, "end_positions": ends}
        return Encoded(Dataset.from_dict(columns), kept, labelled, notes=windows)

    def _cut_questions(self, questions: list[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        limit = min(LONGEST_QUESTION, max(1, self.max_length // 2))
        encoded = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            question if len(offsets) <= limit else question[: offsets[limit - 1][1]]
            for question, offsets in zip(questions, encoded["offset_mapping"])
        ]

    def _stride(self, questions: list[str], tokenizer: PreTrainedTokenizerBase) -> int:
        longest = max(len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"])
        room = self.max_length - longest - tokenizer.num_special_tokens_to_add(pair=True)
        stride = min(USUAL_STRIDE, room // 2) if self.options.doc_stride is None else self.options.doc_stride
        if not 0 <= stride < room:
            raise ValueError(
                f"windows of --max_length {self.max_length} have {max(room, 0)} tokens for the context next to a"
                f" question of {longest}, and --doc_stride {stride} of them are shared; take a smaller stride or"
                " longer windows"
            )
        return stride

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        return outputs["start_logits"], outputs["end_logits"]

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(encoded.rows)
        null = np.full(len(encoded.rows), np.inf)
        for window, start, end in zip(encoded.notes, kept[0], kept[1]):
            null[window.row] = min(null[window.row], float(start[0]) + float(end[0]))
            found = best_span(start, end, window.spans, self.options.n_best, self.options.max_answer_length)
            if found is not None and found[0] > best[window.row][0]:
                context = encoded.rows[window.row]["context"]
                best[window.row] = (found[0], context[found[1] : found[2]])
        predicted = []
        for row, (score, text), nothing in zip(encoded.rows, best, null):
            if self.no_answer and nothing - score > self.options.null_threshold:
                text = ""
            margin = float(nothing - score) if np.isfinite(score) else None  # no start and end made a span
            entry = {"question": row["question"], "prediction": text, "null_score": margin}
            predicted.append({**entry, "reference": row["answers"]} if "answers" in row else entry)
        return predicted

    def trivial(self, train: Encoded) -> Trivial | None:
        without = sum(not row["answers"] for row in train.rows)
        none = 2 * without > len(train.rows)
        return Trivial("never an answer" if none else "the whole context", none)

    def guess(self, answer: Any, row: Mapping[str, Any]) -> Any:
        return "" if answer else row["context"]

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        guess, gold = [row["prediction"] for row in rows], [row["reference"] for row in rows]
        return self.metric_of("squad", guess, gold, no_answer=self.no_answer)


def _without_space(offsets: np.ndarray, inside: np.ndarray, context: str) -> np.ndarray:
    """Spans of the context's tokens without the space that some tokens begin with (a window's first token keeps
    it)."""
    spans = np.where(inside[:, None], offsets.reshape(-1, 2), -1)
    for token in np.flatnonzero(inside):
        begin, end = spans[token]
        while begin < end and context[begin].isspace():
            begin += 1
        spans[token, 0] = begin
    return spans


def place_of(window: Window, span: tuple[int, int] | None) -> tuple[int, int]:
    """First and last token of the characters [begin, end) in a window; (0, 0) when they are not wholly inside."""
    inside = np.flatnonzero(window.spans[:, 1] > window.spans[:, 0])
    if span is None or not len(inside):
        return 0, 0
    begins, ends = window.spans[inside].T
    if span[0] < begins[0] or span[1] > ends[-1]:
        return 0, 0
    first, last = inside[ends > span[0]], inside[begins < span[1]]
    return (int(first[0]), int(last[-1])) if len(first) and len(last) else (0, 0)


def best_span(
    start: np.ndarray, end: np.ndarray, spans: np.ndarray, n_best: int, longest: int
) -> tuple[float, int, int] | None:
    """(score, first character, end character) of the span with the largest sum of start and end logit.

    start, end: [at least T]; spans [T, 2] of characters, empty or negative outside the context. Spans have at most
    `longest` tokens; only the `n_best` best starts and ends are combined. None if the window has no context.
    """
    inside = np.flatnonzero(spans[:, 1] > spans[:, 0])
    if not len(inside):
        return None
    starts = inside[np.argsort(-start[inside], kind="stable")[:n_best]]
    ends = inside[np.argsort(-end[inside], kind="stable")[:n_best]]
    length = ends[None, :] - starts[:, None] + 1
    scores = start[starts].astype(float)[:, None] + end[ends].astype(float)[None, :]
    scores = np.where((length >= 1) & (length <= longest), scores, -np.inf)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    if scores[first, last] == -np.inf:
        return None
    return float(scores[first, last]), int(spans[starts[first], 0]), int(spans[ends[last], 1])
