"""Small generated tasks with known answers, for tests, benchmarks and first experiments.

Every function is deterministic in its arguments and returns a `datasets.Dataset` with the columns `input_ids` and
`labels` of equal length. Labels follow the convention of causal models in transformers: the label at position t is the
token to be predicted *at* t, from the positions before it (the loss shifts); -100 is not scored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED_LABEL = -100
BLANK_ID = 0  # fills places that carry nothing
SEPARATOR_ID = 1  # divides what is given from what is asked
FIRST_SYMBOL_ID = 2
BYTE_VOCAB_SIZE = 256


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


def byte_dataset(path: str | os.PathLike[str], block_size: int, *, start: float = 0.0, stop: float = 1.0) -> Dataset:
    """Language modelling by characters on a file: ids are its bytes (0 to 255), cut in blocks of `block_size`.

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


def _dataset(input_ids: np.ndarray, labels: np.ndarray) -> Dataset:
    from datasets import Dataset, Features, List, Value

    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
    return Dataset.from_dict({"input_ids": input_ids, "labels": labels}, features=features)


def _at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ValueError(f"{name}={value} is too small; take at least {smallest}")
