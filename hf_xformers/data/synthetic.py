# SPDX-License-Identifier: Apache-2.0
"""Small generated tasks with known answers, for tests, benchmarks and first experiments.

Every function is deterministic in its arguments and returns a `datasets.Dataset` with the columns `input_ids` and
`labels`. In tasks about tokens the two have equal length, and labels follow the convention of causal models in
transformers: the label at position t is the token to be predicted *at* t, from the positions before it (the loss
shifts);
-100 is not scored. In tasks about whole rows ([`list_operations`], [`needle_retrieval`]) the label is one class.
[`disjoint`] makes a training and a held-out part of any of them.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED_LABEL = -100
BLANK_ID = 0  # fills places that carry nothing
SEPARATOR_ID = 1  # divides what is given from what is asked
FIRST_SYMBOL_ID = 2
BYTE_VOCAB_SIZE = 256
DIGITS = 10
LIST_OPERATORS = ("MAX", "MIN", "MED", "SM")
FIRST_OPERATOR_ID = FIRST_SYMBOL_ID + DIGITS
CLOSE_ID = FIRST_OPERATOR_ID + len(LIST_OPERATORS)
LIST_VOCAB_SIZE = CLOSE_ID + 1
_EXPRESSIONS = 100_000  # that are drawn for a row of list operations


def copy_task(num_examples: int, length: int, vocab_size: int, seed: int = 0) -> Dataset:
    """Copy a random sequence: `x_1 .. x_n SEP x_1 .. x_n`, 2n + 1 tokens, the second half scored.

    Symbols are uniform over `2 .. vocab_size - 1`. Memory of n tokens is needed, and attention at distance n + 1.

    Raises:
        ValueError: `num_examples` or `length` below 1, or fewer than two symbols.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("length", length, 1)
    _at_least("vocab_size", vocab_size, FIRST_SYMBOL_ID + 2)
    random = np.random.default_rng(seed)
    symbols = random.integers(FIRST_SYMBOL_ID, vocab_size, size=(num_examples, length), dtype=np.int32)
    separator = np.full((num_examples, 1), SEPARATOR_ID, dtype=np.int32)
    input_ids = np.concatenate([symbols, separator, symbols], axis=1)
    labels = input_ids.copy()
    labels[:, : length + 1] = IGNORED_LABEL
    return _dataset(input_ids, labels)


def associative_recall(
    num_examples: int, length: int, num_pairs: int, vocab_size: int, seed: int = 0, *, skew: float = 0.1
) -> Dataset:
    """Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology"): look up values by their keys.

    A row lists `num_pairs` pairs `key value`, a separator, and then asks every key once, in random order: `key value`
    again, with the value scored. Queries stand in random slots of two tokens; empty slots hold `BLANK_ID`. A slot at
    distance i from the separator is drawn with weight `i ** (skew - 1)`: a small `skew` puts most queries near the
    pairs, as references in text are mostly short; `skew=1` spreads them evenly.

    Args:
        length: tokens per row; a token that does not fit in a slot is blank.
        num_pairs: pairs to remember. Keys of a row differ from each other; values may repeat.
        vocab_size: keys are the lower half of the symbols `2 .. vocab_size - 1`, values the upper half.

    Raises:
        ValueError: `length` shorter than the `4 * num_pairs + 1` tokens of pairs, separator and queries, fewer keys
            than pairs, or a setting out of range.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("num_pairs", num_pairs, 1)
    _at_least("length", length, 4 * num_pairs + 1)
    num_keys = (vocab_size - FIRST_SYMBOL_ID) // 2
    if num_keys < num_pairs:
        raise ValueError(
            f"vocab_size={vocab_size} gives {max(num_keys, 0)} keys for num_pairs={num_pairs} different ones; "
            f"take vocab_size of at least {2 * num_pairs + FIRST_SYMBOL_ID}"
        )
    if not skew > 0:
        raise ValueError(f"skew={skew} must be greater than 0; 1 spreads the queries evenly")
    random = np.random.default_rng(seed)
    rows = np.arange(num_examples)[:, None]
    # The first columns of a random permutation per row: different keys, or slots, without a loop.
    keys = FIRST_SYMBOL_ID + random.random((num_examples, num_keys)).argsort(axis=1)[:, :num_pairs]
    values = random.integers(
        FIRST_SYMBOL_ID + num_keys, FIRST_SYMBOL_ID + 2 * num_keys, size=(num_examples, num_pairs)
    )

    given = 2 * num_pairs + 1
    num_slots = (length - given) // 2
    # Sampling without replacement by weights w: the largest of log(w) + Gumbel noise (Efraimidis and Spirakis 2006).
    log_weights = (skew - 1.0) * np.log(np.arange(1, num_slots + 1))
    slots = np.argsort(-(log_weights + random.gumbel(size=(num_examples, num_slots))), axis=1)[:, :num_pairs]
    slots = random.permuted(slots, axis=1)  # so that the order of the keys says nothing about their slots

    input_ids = np.full((num_examples, length), BLANK_ID, dtype=np.int32)
    input_ids[:, 0 : given - 1 : 2] = keys
    input_ids[:, 1 : given - 1 : 2] = values
    input_ids[:, given - 1] = SEPARATOR_ID
    labels = np.full((num_examples, length), IGNORED_LABEL, dtype=np.int32)
    positions = given + 2 * slots
    input_ids[rows, positions] = keys
    input_ids[rows, positions + 1] = values
    labels[rows, positions + 1] = values
    return _dataset(input_ids, labels)


def two_hop_recall(num_examples: int, num_pairs: int, vocab_size: int, seed: int = 0) -> Dataset:
    """Recall in two steps: a row lists the pairs `key middle` and `middle value` in random order, a separator, and
    then `key value` for every key in random order, 6 `num_pairs` + 1 tokens, with the values scored.

    A value is found by its middle alone, whichever of the two pairs comes first (an induction over one more step than
    [`associative_recall`]). Keys, middles and values are thirds of the symbols `2 .. vocab_size - 1`; those of a row
    differ from each other.

    Raises:
        ValueError: a setting below 1, or fewer keys than pairs.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("num_pairs", num_pairs, 1)
    each = (vocab_size - FIRST_SYMBOL_ID) // 3
    if each < num_pairs:
        raise ValueError(
            f"vocab_size={vocab_size} gives {max(each, 0)} keys for num_pairs={num_pairs} different ones; "
            f"take vocab_size of at least {3 * num_pairs + FIRST_SYMBOL_ID}"
        )
    random = np.random.default_rng(seed)
    keys, middles, values = (
        FIRST_SYMBOL_ID + third * each + random.random((num_examples, each)).argsort(axis=1)[:, :num_pairs]
        for third in range(3)
    )
    links = np.concatenate([np.stack([keys, middles], -1), np.stack([middles, values], -1)], axis=1)
    asked = np.stack([keys, values], -1)
    links, asked = (  # each row in an order of its own
        np.take_along_axis(pairs, random.random(pairs.shape[:2]).argsort(axis=1)[..., None], axis=1)
        for pairs in (links, asked)
    )
    separator = np.full((num_examples, 1), SEPARATOR_ID)
    parts = [links.reshape(num_examples, -1), separator, asked.reshape(num_examples, -1)]
    input_ids = np.concatenate(parts, axis=1).astype(np.int32)
    labels = np.full_like(input_ids, IGNORED_LABEL)
    labels[:, 4 * num_pairs + 2 :: 2] = input_ids[:, 4 * num_pairs + 2 :: 2]
    return _dataset(input_ids, labels)


def state_tracking(num_examples: int, length: int, elements: int, seed: int = 0) -> Dataset:
    """Products of permutations (Merrill et al. 2024, arXiv 2404.08819): the label at t is the product of the tokens
    before t, 2 + the number of a permutation of so many `elements` in lexicographic order. Two elements: parity. Five:
    S5, which no transformer or diagonal recurrence of constant depth tracks over any length.

    The last token of a row is blank. Labels are other tokens than the row's, so this is for causal models alone.

    Raises:
        ValueError: `num_examples` below 1, `length` or `elements` below 2, or more than 6 elements.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("length", length, 2)
    _at_least("elements", elements, 2)
    if elements > 6:
        raise ValueError(f"elements={elements} have {math.factorial(elements)} permutations; take at most 6 elements")
    group = np.array(list(itertools.permutations(range(elements))))
    powers = elements ** np.arange(elements)
    number = np.full(elements**elements, -1)
    number[group @ powers] = np.arange(len(group))
    random = np.random.default_rng(seed)
    drawn = random.integers(len(group), size=(num_examples, length - 1))
    labels = np.full((num_examples, length), IGNORED_LABEL, dtype=np.int32)
    state = np.broadcast_to(np.arange(elements), (num_examples, elements))
    for place in range(length - 1):
        state = np.take_along_axis(group[drawn[:, place]], state, axis=1)  # the new one after what came before
        labels[:, place + 1] = FIRST_SYMBOL_ID + number[state @ powers]
    input_ids = np.full((num_examples, length), BLANK_ID, dtype=np.int32)
    input_ids[:, :-1] = FIRST_SYMBOL_ID + drawn
    return _dataset(input_ids, labels)


def list_operations(
    num_examples: int, length: int, seed: int = 0, *, max_depth: int = 4, max_arguments: int = 5
) -> Dataset:
    """ListOps (Nangia and Bowman 2018; as in the Long Range Arena, Tay et al. 2021, section 3.2.1): the value of
    nested operations on digits, one of ten classes.

    `[MAX 4 [MIN 2 9 ] 0 ]` is 4. Operators are the largest, the smallest, the median (rounded down) and the sum modulo
    10 of at least two arguments. Ids: digit d is `2 + d`, the operators 12 to 15 (with their bracket), 16 closes, 0
    fills the row up to `length` behind the expression. The expression takes between half and all of the row.

    Columns: `input_ids` [length], `attention_mask` [length] (0 where filled up), `labels` (0 to 9).

    Raises:
        ValueError: `length` below 4 (an operator, two digits, the end), a setting out of range, or operations that
            hardly ever are half as long as a row.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("length", length, 4)
    _at_least("max_depth", max_depth, 1)
    _at_least("max_arguments", max_arguments, 2)
    random = Random(seed)
    input_ids = np.full((num_examples, length), BLANK_ID, dtype=np.int32)
    mask = np.zeros((num_examples, length), dtype=np.int32)
    labels = np.zeros(num_examples, dtype=np.int32)
    for row in range(num_examples):
        for _ in range(_EXPRESSIONS):
            found, value = _expression(random, length, max_depth, max_arguments)
            if len(found) >= length / 2:  # else a small tree; another one
                break
        else:
            raise ValueError(
                f"operations of max_depth={max_depth} on at most max_arguments={max_arguments} do not fill half of"
                f" length={length}; raise these, or take shorter rows"
            )
        input_ids[row, : len(found)], mask[row, : len(found)], labels[row] = found, 1, value
    return _dataset(input_ids, labels, attention_mask=mask)


def _expression(random: Random, room: int, depth: int, max_arguments: int) -> tuple[list[int], int]:
    """Tokens (at most `room`) and value of a random operation."""
    operator = random.randrange(len(LIST_OPERATORS))
    tokens, values = [FIRST_OPERATOR_ID + operator], []
    for index in range(random.randint(2, max_arguments)):
        left = room - len(tokens) - 1  # the end needs one
        needed = max(1 - index, 0)  # digits that must follow
        if left < 1 + needed:
            break
        if depth > 1 and left - needed >= 4 and random.random() < 0.5:
            part, value = _expression(random, left - needed, depth - 1, max_arguments)
        else:
            value = random.randrange(DIGITS)
            part = [FIRST_SYMBOL_ID + value]
        tokens += part
        values.append(value)
    ordered, half = sorted(values), len(values) // 2
    median = (ordered[half] + ordered[-half - 1]) // 2
    return [*tokens, CLOSE_ID], (ordered[-1], ordered[0], median, sum(values) % DIGITS)[operator]


def needle_retrieval(num_examples: int, length: int, num_values: int = 10, seed: int = 0) -> Dataset:
    """Long-range retrieval: a row of random symbols, and among them one marker; the class is the symbol behind the
    marker.

    (A needle in a haystack in its smallest form, like the single-needle task of RULER, Hsieh et al. 2024.) The marker,
    id 1, stands in the middle half of the row, so that it is at least a quarter of the row away from either end,
    wherever a model reads its answer. The other tokens are values, too, so that nothing but the marker tells.

    Columns: `input_ids` [length], symbols from 2 on; `labels` (0 to `num_values - 1`).

    Raises:
        ValueError: `length` below 4, or fewer than two values.
    """
    _at_least("num_examples", num_examples, 1)
    _at_least("length", length, 4)
    _at_least("num_values", num_values, 2)
    random = np.random.default_rng(seed)
    symbols = (num_examples, length)
    input_ids = random.integers(FIRST_SYMBOL_ID, FIRST_SYMBOL_ID + num_values, size=symbols, dtype=np.int32)
    first, behind = length // 4, max(length - length // 4 - 1, length // 4 + 1)
    rows, places = np.arange(num_examples), random.integers(first, behind, size=num_examples)
    labels = input_ids[rows, places + 1] - FIRST_SYMBOL_ID
    input_ids[rows, places] = SEPARATOR_ID
    return _dataset(input_ids, labels)


def disjoint(
    make: Callable[[int, int], Dataset], train: int, held_out: int, seed: int = 0, attempts: int = 20
) -> tuple[Dataset, Dataset]:
    """Two datasets of `make(num_examples, seed)`: `train` rows, and `held_out` other rows none of which is in
    training.

    Raises:
        ValueError: the task has too few different rows for that.
    """
    from datasets import Dataset, concatenate_datasets

    training = make(train, seed)
    seen = set(_rows(training))
    parts: list[Any] = []
    missing = held_out
    for attempt in range(1, attempts + 1):
        more = make(held_out, seed + attempt * 1_000_003)
        kept: list[int] = []
        for index, row in enumerate(_rows(more)):
            if row not in seen and len(kept) < missing:
                seen.add(row)
                kept.append(index)
        parts.append(Dataset.from_dict(more[kept], features=more.features))
        missing -= len(kept)
        if missing == 0:
            return training, concatenate_datasets(parts)
    raise ValueError(
        f"the task has no {held_out} rows besides the {train} of training; take fewer rows, or longer ones"
    )


def _rows(dataset: Dataset) -> list[bytes]:
    """What tells the rows apart."""
    return [row.tobytes() for row in np.asarray(dataset["input_ids"][:], dtype=np.int32)]


def byte_dataset(path: str | os.PathLike[str], block_size: int, *, start: float = 0.0, stop: float = 1.0) -> Dataset:
    """Language modeling by characters on a file: ids are its bytes (0 to 255), cut in blocks of `block_size`.

    Args:
        start, stop: the part of the file to use, as fractions of its bytes: 0 to 0.9 for training and 0.9 to 1 for
            validation, for instance. The last incomplete block is left out.

    Raises:
        ValueError: no such file, fewer bytes than one block, or fractions that are not 0 <= start < stop <= 1.
    """
    _at_least("block_size", block_size, 1)
    if not 0 <= start < stop <= 1:
        raise ValueError(f"start={start}, stop={stop} are not fractions with 0 <= start < stop <= 1")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {os.fspath(path)!r} (looked from {os.getcwd()!r}); give a text file")
    content = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    content = content[round(start * len(content)) : round(stop * len(content))]
    blocks = len(content) // block_size
    if blocks == 0:
        raise ValueError(
            f"{os.fspath(path)!r} has {len(content)} bytes from {start} to {stop}, less than one block of "
            f"block_size={block_size}; take a smaller block or a larger part"
        )
    input_ids = content[: blocks * block_size].reshape(blocks, block_size).astype(np.int32)
    return _dataset(input_ids, input_ids)


def _dataset(input_ids: np.ndarray, labels: np.ndarray, **more: np.ndarray) -> Dataset:
    from datasets import Dataset, Features, List, Value

    columns = {"input_ids": input_ids, **more, "labels": labels}
    kinds = {name: List(Value("int32")) if rows.ndim == 2 else Value("int32") for name, rows in columns.items()}
    return Dataset.from_dict(columns, features=Features(kinds))


def _at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ValueError(f"{name}={value} is too small; take at least {smallest}")
