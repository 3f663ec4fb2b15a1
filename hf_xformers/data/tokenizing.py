# SPDX-License-Identifier: Apache-2.0
"""From texts to rows of tokens, one row per document, for map-style and streaming datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .pieces import LONGEST_PIECE, pieces

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict
    from transformers import PreTrainedTokenizerBase

D = TypeVar("D", bound="Dataset | IterableDataset | DatasetDict | IterableDatasetDict")

NO_WORD = -1  # word id of special tokens, which whole-word masking must leave alone


def tokenize_dataset(
    dataset: D,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str = "text",
    add_special_tokens: bool = False,
    max_length: int | None = None,
    word_ids: bool = False,
    num_proc: int | None = None,
) -> D:
    """One row of `input_ids` per document; the other columns go.

    Args:
        dataset: map-style or streaming dataset, or a dictionary of these.
        add_special_tokens: put the tokenizer's special tokens around every document. Leave it off before `pack`, which
            sets its own.
        max_length: cut longer documents to this many tokens, special tokens included.
        word_ids: add the column `word_ids`: the number of the word within its document that a token belongs to, -1 for
            special tokens. Needs a fast tokenizer. Words are those of its pre-tokenizer.
        num_proc: processes; default: none besides this one. Not used for streaming datasets.

    Raises:
        ValueError: no such text column (the message lists the columns), or `word_ids` with a slow tokenizer.
    """
    if word_ids and not tokenizer.is_fast:
        raise ValueError(
            f"word_ids needs a fast tokenizer and {type(tokenizer).__name__} is a slow one; "
            "load it with AutoTokenizer, or set word_ids=False"
        )
    from datasets import Dataset, Features, List, Value

    def tokenize(part: Any) -> Any:
        columns = column_names(part)
        if text_column not in columns:
            raise ValueError(f"the dataset has no column {text_column!r} to tokenize; its columns are {columns}")
        features = Features({name: List(Value("int32")) for name in ("input_ids", "word_ids")[: 1 + word_ids]})
        if isinstance(part, Dataset) and len(part) == 0:  # `map` would return it without columns
            return empty(features)
        return part.map(
            _tokenize_batch,
            batched=True,
            remove_columns=columns,
            features=features,
            fn_kwargs={
                "tokenizer": tokenizer,
                "text_column": text_column,
                "add_special_tokens": add_special_tokens,
                "max_length": max_length,
                "word_ids": word_ids,
            },
            **({"num_proc": num_proc} if isinstance(part, Dataset) else {}),
        )

    return for_each_split(dataset, tokenize)


def document_lengths(dataset: Dataset, column: str = "input_ids") -> np.ndarray:
    """Number of tokens of every row of a tokenized map-style dataset, int64 of shape [rows]."""
    if column not in dataset.column_names:
        raise ValueError(f"the dataset has no column {column!r}; its columns are {dataset.column_names}")
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000)
    return np.concatenate([np.empty(0, np.int64), *(list_lengths(table.column(column)) for table in tables)])


def _tokenize_batch(
    batch: Mapping[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    text_column: str,
    add_special_tokens: bool,
    max_length: int | None,
    word_ids: bool,
) -> dict[str, list[list[int]]]:
    texts = list(batch[text_column])
    if not add_special_tokens and max_length is None and any(len(text) > LONGEST_PIECE for text in texts):
        return _tokenize_long(texts, tokenizer, text_column, word_ids)
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        truncation=max_length is not None,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents longer than the model's input are the normal case before packing
    )
    rows: dict[str, list[list[int]]] = {"input_ids": encoded["input_ids"]}
    if word_ids:
        rows["word_ids"] = [
            [NO_WORD if word is None else word for word in encoded.word_ids(index)]
            for index in range(len(rows["input_ids"]))
        ]
    return rows


def _tokenize_long(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, text_column: str, word_ids: bool
) -> dict[str, list[list[int]]]:
    """The same, piece by piece, since a tokenizer takes hundreds of bytes for each character of its input."""
    rows: dict[str, list[list[int]]] = {name: [] for name in ("input_ids", "word_ids")[: 1 + word_ids]}
    for text in texts:
        ids: list[int] = []
        words: list[int] = []
        for piece in pieces(text):
            part = _tokenize_batch({text_column: [piece]}, tokenizer, text_column, False, None, word_ids)
            ids += part["input_ids"][0]
            if word_ids:
                before = words[-1] + 1 if words else 0
                words += [word + before for word in part["word_ids"][0]]
        rows["input_ids"].append(ids)
        if word_ids:
            rows["word_ids"].append(words)
    return rows


# --- shared with packing -------------------------------------------------------------------------------------------


def list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    import pyarrow.compute as pc

    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


def empty(features: Features) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({name: [] for name in features}, features=features)


def for_each_split(dataset: Any, transform: Any) -> Any:
    """Applies `transform` to a dataset, or to every dataset of a dictionary of splits."""
    if isinstance(dataset, dict):
        return type(dataset)({split: transform(part) for split, part in dataset.items()})
    return transform(dataset)


def column_names(dataset: Any) -> list[str]:
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset.take(1)), {}))  # a stream that does not know its columns beforehand
