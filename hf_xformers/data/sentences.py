# SPDX-License-Identifier: Apache-2.0
"""Documents as sentences: cutting text, and rows of tokens that say which sentence each token is of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .tokenizing import column_names

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# After a full stop and whatever closes with it, before what a sentence can begin with; and between paragraphs.
_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])|\n\s*\n")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line: it ends at a full stop, question or exclamation mark before a capital
    letter or a digit, and at an empty line."""
    found = (" ".join(part.split()) for part in _END.split(text))
    return [sentence for sentence in found if sentence]


def sentence_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends every sentence. Raises ValueError for a tokenizer that has none."""
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has neither an eos nor a sep token, of which one ends every sentence: add one"
        )
    return end


def encode_sentences(
    documents: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[list[list[int]]]:
    """Ids of every sentence of every document, cut to `longest` with the token that ends it. A sentence without a
    token has an empty list."""
    end = sentence_end(tokenizer)
    flat = [sentence for document in documents for sentence in document]
    encoded = tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else []
    ended = iter([[*ids[: longest - 1], end] if len(ids) else [] for ids in encoded])
    return [[next(ended) for _ in document] for document in documents]


def sentence_words(
    documents: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[list[int]]:
    """The number of each token's word in its sentence, -1 for what ends it, of all sentences that have a token, in
    their order. Raises ValueError for a tokenizer that knows no words."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} knows no words to be masked as a whole: use a fast tokenizer")
    flat = [sentence for document in documents for sentence in document]
    encoded = tokenizer(flat, add_special_tokens=False, verbose=False).encodings or [] if flat else []
    words = ([-1 if word is None else word for word in found.word_ids] for found in encoded)
    return [[*found[: longest - 1], -1] for found in words if found]


def numbered(sentences: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """`input_ids` and `sentence_ids` of a row of sentences."""
    row: dict[str, list[int]] = {"input_ids": [], "sentence_ids": []}
    for number, ids in enumerate(sentences):
        row["input_ids"] += ids
        row["sentence_ids"] += [number] * len(ids)
    return row


def fill_rows(sentences: Iterable[Sequence[int]], length: int) -> Iterator[list[Sequence[int]]]:
    """Consecutive sentences, as many to a row as fit into `length` tokens."""
    row: list[Sequence[int]] = []
    filled = 0
    for ids in sentences:
        if row and filled + len(ids) > length:
            yield row
            row, filled = [], 0
        row.append(ids)
        filled += len(ids)
    if row:
        yield row


def document_rows(
    texts: Any,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    longest: int,
    *,
    words: bool = False,
    num_proc: int | None = None,
) -> Any:
    """A dataset of rows with `input_ids` and `sentence_ids`, of a dataset with a column `text`, one document each.
    words: and with `word_ids`, -1 for what ends a sentence.

    length: tokens of a row at most, which holds whole sentences of one document; longest: tokens of a sentence at
    most, its end included; what is beyond is left out. A stream gives a stream.

    Raises ValueError for sentences longer than rows, and where no document has a sentence.
    """
    from datasets import Dataset

    if longest > length:
        raise ValueError(
            f"sentences of up to {longest} tokens do not fit into rows of {length}; take a longer --block_size, or"
            " shorter sentences"
        )
    sentence_end(tokenizer)

    def cut(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        rows: dict[str, list[list[int]]] = {"input_ids": [], "sentence_ids": []}
        if words:
            rows["word_ids"] = []
        texts = [split_sentences(text) for text in batch["text"]]
        numbers = iter(sentence_words(texts, tokenizer, longest) if words else ())
        for document in encode_sentences(texts, tokenizer, longest):
            for sentences in fill_rows((ids for ids in document if ids), length):
                row = numbered(sentences)
                if words:
                    row["word_ids"] = [number for _, own in zip(sentences, numbers) for number in own]
                for name, values in row.items():
                    rows[name].append(values)
        return rows

    several = {"num_proc": num_proc} if isinstance(texts, Dataset) else {}
    found = texts.map(cut, batched=True, batch_size=100, remove_columns=column_names(texts), **several)
    if isinstance(found, Dataset) and not len(found):
        raise ValueError("no document has a sentence; give text, or another --text_column")
    return found


def sentence_documents(texts: Any, *, num_proc: int | None = None) -> Dataset:
    """The sentences of every document, in the column `sentences`, of a dataset with a column `text`.

    Raises ValueError for a stream, whose documents cannot be read in any order.
    """
    from datasets import Dataset

    if not isinstance(texts, Dataset):
        raise ValueError("documents that are paired with each other cannot be streamed; leave --streaming out")
    return texts.map(_cut, batched=True, remove_columns=texts.column_names, num_proc=num_proc)


def _cut(batch: Mapping[str, list[str]]) -> dict[str, list[list[str]]]:
    return {"sentences": [split_sentences(text) for text in batch["text"]]}
