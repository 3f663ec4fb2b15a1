# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens from parallel text: pairs of translations side by side, and streams of one language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..objectives.translation_lm import COUNTS, LANGUAGES, Multilingual, pair_row, shortened

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_MARKS = 4  # tokens of a row of a pair that are not text


def parallel_rows(
    texts: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    objective: Multilingual,
    length: int,
    *,
    num_proc: int | None = None,
) -> Dataset:
    """Rows of at most `length` tokens of a dataset with columns `text` and `translation`: `input_ids`, `position_ids`,
    `langs` (0 for the first of the objective's languages) and `token_counts`, how often each token occurs in `texts`.

    Raises ValueError for rows without room for a pair, and for a tokenizer without a token that ends sentences.
    """
    from datasets import Features, List, Value, concatenate_datasets

    from ..data.sentences import sentence_end

    end, columns = sentence_end(tokenizer), ("text", "translation")
    if length < _MARKS + 2:
        raise ValueError(f"rows of --block_size {length} have no room for a pair; take at least {_MARKS + 2}")

    def encode(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        return {name: tokenizer(batch[name], add_special_tokens=False, verbose=False)["input_ids"] for name in columns}

    ids = List(Value("int32"))
    encoded = texts.map(
        encode,
        batched=True,
        remove_columns=texts.column_names,
        features=Features(dict.fromkeys(columns, ids)),
        num_proc=num_proc,
    )
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for batch in encoded.iter(1000):
        for name in columns:
            flat = [token for row in batch[name] for token in row]
            counts += np.bincount(np.array(flat, dtype=np.int64), minlength=len(counts))
    features = Features(dict.fromkeys(("input_ids", "position_ids", LANGUAGES, COUNTS), ids))

    def beside(batch: Mapping[str, list[list[int]]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {name: [] for name in features}
        for first, second in zip(batch["text"], batch["translation"]):
            short = shortened(first, second, length - _MARKS)
            row = pair_row(*short, end, reset=getattr(objective, "reset_positions", True))
            for name, values in row.items():
                rows[name].append(values)
            rows[COUNTS].append(counts[row["input_ids"]])
        return rows

    parts = []
    if "pairs" in objective.tasks_of_rows:
        parts.append(
            encoded.map(beside, batched=True, remove_columns=list(columns), features=features, num_proc=num_proc)
        )
    if "streams" in objective.tasks_of_rows:
        parts += _streams(encoded, tokenizer, objective, length, counts, features)
    rows = concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    if not len(rows):
        raise ValueError("the text gives no row of tokens; give more text")
    return rows


def _streams(
    encoded: Dataset, tokenizer: Any, objective: Multilingual, length: int, counts: np.ndarray, features: Any
) -> list[Dataset]:
    """Sentences of each language one after the other, in rows of `length` tokens; the languages have the shares q_l ~
    p_l^f of all rows, by repeating rows and leaving some out."""
    from ..data import pack

    packed = [
        pack(encoded.select_columns(name).rename_column(name, "input_ids"), length, tokenizer=tokenizer,
             keep_remainder=True)
        for name in ("text", "translation")
    ]  # fmt: skip
    sizes = np.array([len(rows) for rows in packed], dtype=np.float64)
    shares = (sizes / sizes.sum()) ** objective.lg_sampling_factor
    wanted = np.maximum(1, np.round(sizes.sum() * shares / shares.sum())).astype(int)

    def complete(batch: Mapping[str, list[list[int]]], language: int) -> dict[str, list[Any]]:
        rows = batch["input_ids"]
        return {
            "input_ids": rows,
            "position_ids": [list(range(len(row))) for row in rows],
            LANGUAGES: [[language] * len(row) for row in rows],
            COUNTS: [counts[row] for row in rows],
        }

    return [
        rows.select(np.arange(number) % len(rows)).map(
            complete, batched=True, features=features, fn_kwargs={"language": language}
        )
        for language, (rows, number) in enumerate(zip(packed, wanted))
    ]
