# SPDX-License-Identifier: Apache-2.0
"""Tasks with held-out rows that show what a mechanism can learn, and the form in which models of each shape get
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data import (
    associative_recall,
    copy_task,
    disjoint,
    list_operations,
    needle_retrieval,
    state_tracking,
    stdlib_corpus,
    two_hop_recall,
)
from ..data import synthetic as ids

IGNORED = ids.IGNORED_LABEL
SYMBOLS = 8  # different tokens to copy, keys, and values
MANY_SYMBOLS = 64  # keys, and values, where a row is to hold many pairs
HIDDEN_SHARE = 0.15  # of the bytes of a text, for models that fill gaps


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        about: what is asked, and where the task comes from.
        classes: how many for whole rows; None: tokens are scored.
        at_question: a model that fills gaps answers one place before the gap, where the question stands.
        causal: answers are no tokens of the row, so that only a model that predicts the next token can give them.
        make: (length, rows, held-out rows, seed) -> two parts, each with `input_ids`, `labels` and perhaps
            `attention_mask`.
    """

    about: str
    vocab_size: int
    make: Callable[[int, int, int, int], tuple[Any, Any]]
    classes: int | None = None
    shortest: int = 4
    at_question: bool = False
    causal: bool = False

    @property
    def order(self) -> tuple[str, ...]:
        """The shapes that suit the task, best first: tokens are predicted as a causal model does, rows read as a
        whole."""
        if self.causal:
            return ("decoder",)
        return ("encoder", "decoder", "seq2seq") if self.classes else ("decoder", "encoder", "seq2seq")


def _copy(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    half = (length - 1) // 2
    return disjoint(lambda n, s: copy_task(n, half, ids.FIRST_SYMBOL_ID + SYMBOLS, s), rows, held_out, seed)


def _mqar(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    pairs = min(max(length // 8, 1), SYMBOLS)
    vocabulary = ids.FIRST_SYMBOL_ID + 2 * SYMBOLS
    return disjoint(lambda n, s: associative_recall(n, length, pairs, vocabulary, s), rows, held_out, seed)


def _recall(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    pairs = min(length // 8, MANY_SYMBOLS)
    vocabulary = ids.FIRST_SYMBOL_ID + 2 * MANY_SYMBOLS
    return disjoint(lambda n, s: associative_recall(n, length, pairs, vocabulary, s, skew=1.0), rows, held_out, seed)


def _two_hop(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    pairs = min((length - 1) // 6, MANY_SYMBOLS)
    vocabulary = ids.FIRST_SYMBOL_ID + 3 * MANY_SYMBOLS
    return disjoint(lambda n, s: two_hop_recall(n, pairs, vocabulary, s), rows, held_out, seed)


def _tracking(elements: int) -> Callable[[int, int, int, int], tuple[Any, Any]]:
    def make(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
        return disjoint(lambda n, s: state_tracking(n, length, elements, s), rows, held_out, seed)

    return make


def _listops(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    return disjoint(lambda n, s: list_operations(n, length, s), rows, held_out, seed)


def _retrieval(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    return disjoint(lambda n, s: needle_retrieval(n, length, ids.DIGITS, s), rows, held_out, seed)


def _text(length: int, rows: int, held_out: int, seed: int) -> tuple[Any, Any]:
    """Blocks of bytes from different documents; a part with too few blocks is shown again."""
    random, parts = np.random.default_rng(seed), []
    for split, wanted in (("train", rows), ("validation", held_out)):
        content = "\n\n".join(stdlib_corpus()[split]["text"]).encode()
        blocks = np.frombuffer(content[: len(content) // length * length], dtype=np.uint8).reshape(-1, length)
        order = np.concatenate([random.permutation(len(blocks)) for _ in range(-(-wanted // len(blocks)))])
        block = blocks[order[:wanted]].astype(np.int32)
        parts.append({"input_ids": block, "labels": block})
    return parts[0], parts[1]


TASKS: dict[str, Task] = {
    "copy": Task("repeat a random sequence", ids.FIRST_SYMBOL_ID + SYMBOLS, _copy),
    "mqar": Task(
        "look up values by their keys (multi-query associative recall, Arora et al. 2023)",
        ids.FIRST_SYMBOL_ID + 2 * SYMBOLS,
        _mqar,
        shortest=5,
        at_question=True,
    ),
    "recall": Task(
        f"the same with a pair for every 8 tokens of a row, of {MANY_SYMBOLS} keys and values, asked evenly",
        ids.FIRST_SYMBOL_ID + 2 * MANY_SYMBOLS,
        _recall,
        shortest=8,
        at_question=True,
    ),
    "two_hop": Task(
        "look up what a key's value leads to, in two steps",
        ids.FIRST_SYMBOL_ID + 3 * MANY_SYMBOLS,
        _two_hop,
        shortest=7,
        at_question=True,
    ),
    "parity": Task("the parity of the bits so far", ids.FIRST_SYMBOL_ID + 2, _tracking(2), causal=True),
    "permutations": Task(
        "the product of the permutations of five elements so far (S5, Merrill et al. 2024)",
        ids.FIRST_SYMBOL_ID + 120,
        _tracking(5),
        causal=True,
    ),
    "listops": Task(
        "value of nested list operations (Nangia and Bowman 2018)", ids.LIST_VOCAB_SIZE, _listops, classes=ids.DIGITS
    ),
    "retrieval": Task(
        "the symbol behind a marker at least a quarter of the row away",
        ids.FIRST_SYMBOL_ID + ids.DIGITS,
        _retrieval,
        classes=ids.DIGITS,
    ),
    "text": Task("bytes of the Python documentation, next or hidden ones", ids.BYTE_VOCAB_SIZE, _text),
}


# ------------------------------------------------------------------------------------------------ stored rows


def write_task(name: str, length: int, rows: int, held_out: int, seed: int, path: Path) -> None:
    """Makes the rows of a task once for all that train on them.

    Raises:
        ValueError: unknown task, or a length that is too short for it.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}")
    task = TASKS[name]
    if length < task.shortest:
        raise ValueError(f"task {name!r} needs rows of at least {task.shortest} tokens, not {length}")
    parts: dict[str, Any] = {}
    for part, found in zip(("train", "held_out"), task.make(length, rows, held_out, seed)):
        for column in ("input_ids", "labels", "attention_mask"):
            if column in (found if isinstance(found, dict) else found.column_names):
                parts[f"{part}.{column}"] = np.asarray(found[column][:], dtype=np.int64)
    np.savez(path, **parts)


@dataclass
class Rows:
    """Rows of one part of a task: input_ids [N, T]; labels [N, T] or [N]; mask [N, T], 1 = real, or None."""

    input_ids: np.ndarray
    labels: np.ndarray
    mask: np.ndarray | None = None


def read_task(path: Path) -> dict[str, Rows]:
    """The parts `train` and `held_out`."""
    with np.load(path) as stored:
        return {
            part: Rows(
                stored[f"{part}.input_ids"],
                stored[f"{part}.labels"],
                stored[f"{part}.attention_mask"] if f"{part}.attention_mask" in stored else None,
            )
            for part in ("train", "held_out")
        }


def chance(task: Task, parts: dict[str, Rows]) -> dict[str, float]:
    """Accuracy and loss (nats) on the held-out answers without looking at the rows: the answer that training has most
    often, and training's frequencies as probabilities."""
    trained, asked = (parts[part].labels[parts[part].labels != IGNORED] for part in ("train", "held_out"))
    counts = np.bincount(trained, minlength=task.vocab_size) + 1e-3
    share = counts / counts.sum()
    return {"accuracy": float((asked == counts.argmax()).mean()), "loss": float(-np.log(share[asked]).mean())}


# ------------------------------------------------------------------------------------------------ for a shape


@dataclass(frozen=True)
class SpecialIds:
    """Ids behind a task's own: hides a token, begins a row, asks for the answer, fills up."""

    mask: int
    begin: int
    ask: int
    pad: int

    @classmethod
    def of(cls, task: Task) -> SpecialIds:
        return cls(*range(task.vocab_size, task.vocab_size + 4))

    @property
    def vocab_size(self) -> int:
        return self.pad + 1


def head_for(task: Task, shape_head: str, heads: tuple[str, ...]) -> str:
    """The class that learns a task: a classifier for whole rows where the family has one, else the language model."""
    return "ForSequenceClassification" if task.classes and "ForSequenceClassification" in heads else shape_head


def inputs_for(task: Task, rows: Rows, head: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Model inputs for `head`, all rows at once.

    - ForSequenceClassification: `begin row ask`, the class as label.
    - ForCausalLM: the row, with the answers in their places; for classes `begin row ask answer`.
    - ForMaskedLM: the same with hidden answers, in their places, or where they are asked for (a key whose value is due
      has to be read from the token before otherwise, which is another skill).
    - ForSeq2SeqLM: hidden answers for the encoder, and the answers in order to decode.
    - Texts: all bytes are answers of a causal model, a random 15 % of each row those of the others.
    """
    special = SpecialIds.of(task)
    if head == "ForSequenceClassification":
        framed, mask, _ = _framed(rows, special, 0)
        return _with_mask({"input_ids": framed, "labels": rows.labels}, mask)
    input_ids, labels, mask = rows.input_ids, rows.labels, rows.mask
    if task.classes:
        input_ids, mask, places = _framed(rows, special, 1)
        each = np.arange(len(input_ids))
        input_ids[each, places] = ids.FIRST_SYMBOL_ID + rows.labels
        labels = np.full_like(input_ids, IGNORED)
        labels[each, places] = input_ids[each, places]
    if head == "ForCausalLM":
        return _with_mask({"input_ids": input_ids, "labels": labels}, mask)
    if (labels != IGNORED).all():
        count = max(round(HIDDEN_SHARE * labels.shape[1]), 1)
        chosen = np.random.default_rng(seed).random(labels.shape).argsort(axis=1)[:, :count]
        hidden = np.full_like(labels, IGNORED)
        np.put_along_axis(hidden, chosen, np.take_along_axis(labels, chosen, axis=1), axis=1)
        labels = hidden
    answers = labels != IGNORED
    masked = np.where(answers, special.mask, input_ids)
    if head == "ForMaskedLM" and task.at_question:
        labels = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], IGNORED)], axis=1)
    if head == "ForSeq2SeqLM":  # every row has as many answers as the others
        labels = labels[answers].reshape(len(labels), -1)
    return _with_mask({"input_ids": masked, "labels": labels}, mask)


def _framed(rows: Rows, special: SpecialIds, more: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """`begin row ask` and `more` free places behind each row, its mask, and the column after `ask` in each row."""
    count, length = rows.input_ids.shape
    sizes = np.full(count, length) if rows.mask is None else rows.mask.sum(axis=1)
    framed = np.full((count, length + 2 + more), special.pad, dtype=rows.input_ids.dtype)
    framed[:, 0] = special.begin
    framed[:, 1 : length + 1] = rows.input_ids
    columns = np.arange(framed.shape[1])[None]
    framed[columns > sizes[:, None]] = special.pad
    framed[np.arange(count), sizes + 1] = special.ask
    if rows.mask is None:
        return framed, None, sizes + 2
    return framed, (columns < sizes[:, None] + 2 + more).astype(framed.dtype), sizes + 2


def _with_mask(inputs: dict[str, np.ndarray], mask: np.ndarray | None) -> dict[str, np.ndarray]:
    return inputs if mask is None else {**inputs, "attention_mask": mask}
