# SPDX-License-Identifier: Apache-2.0
"""Packing: tokenized documents into rows of one exact length.

Packing treats the documents as one endless sequence, each followed by a separator token, and cuts it every `capacity`
tokens (`block_size` less the special tokens of a row). It is exact for any batch size and number of processes: no
token is lost or repeated at a batch border, and only the tail that does not fill a block is left out, or kept on
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..compat import fingerprint
from .tokenizing import NO_WORD, column_names, document_lengths, empty, for_each_split, list_lengths

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict
    from transformers import PreTrainedTokenizerBase

D = TypeVar("D", bound="Dataset | IterableDataset | DatasetDict | IterableDatasetDict")


def pack(
    dataset: D,
    block_size: int,
    *,
    tokenizer: PreTrainedTokenizerBase,
    separate_documents: bool = True,
    add_special_tokens: bool = False,
    word_ids: bool = False,
    keep_remainder: bool = False,
    per_shard: bool = False,
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> D:
    """Packs tokenized documents into rows of exactly `block_size` tokens, in the column `input_ids`.

    Args:
        dataset: what `tokenize_dataset` returns: rows with `input_ids` (and `word_ids`), without special tokens.
        block_size: tokens per row, special tokens included.
        tokenizer: gives the separator (its `eos` token, or else `sep`) and the special tokens of a row.
        separate_documents: put a separator after every document, the last one included.
        add_special_tokens: begin and end every row as the tokenizer does with a text, for instance `[CLS] ... [SEP]`.
        word_ids: keep the column `word_ids`, renumbered 0, 1, ... within each row, so that equal numbers in a row mean
            the same word even where the row holds several documents; -1 for special tokens. A word that a cut divides
            is one word in each of its two rows.
        keep_remainder: keep the tail as a last row, shorter than the others.
        per_shard: for streaming datasets, pack every shard by itself, each with a tail of its own. The stream then
            keeps its number of shards, which is what several loader workers or processes divide among themselves.
            Otherwise it is one sequence with one tail, equal to the map-style rows, and has a single shard.
        batch_size: documents that are handled at a time. It does not change the rows.
        num_proc: processes; default: none besides this one. It does not change the rows. Not used when streaming.

    Shuffle a stream after packing: an order set before is the same in every epoch.

    Raises:
        ValueError: `block_size` too small to hold a token of text, a column missing, or a tokenizer without the
            special tokens asked for.
    """
    from datasets import Dataset, Features, List, Value

    prefix, suffix = _row_special_ids(tokenizer) if add_special_tokens else ((), ())
    if block_size <= len(prefix) + len(suffix):
        raise ValueError(
            f"block_size={block_size} leaves no room for text besides the {len(prefix) + len(suffix)} special tokens "
            f"of a row; take at least {len(prefix) + len(suffix) + 1}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1 document")
    layout = _Layout(
        capacity=block_size - len(prefix) - len(suffix),
        prefix=prefix,
        suffix=suffix,
        separator=_separator_id(tokenizer) if separate_documents else None,
        word_ids=word_ids,
    )
    columns = ["input_ids", *(["word_ids"] if word_ids else [])]
    features = Features({column: List(Value("int32")) for column in columns})

    def pack_one(part: Any) -> Any:
        present = column_names(part)
        missing = [column for column in columns if column not in present]
        if missing:
            raise ValueError(
                f"the dataset to pack has no column {missing[0]!r}, only {present}; "
                f"make it with tokenize_dataset(..., word_ids={word_ids})"
            )
        part = part.select_columns(columns)
        if isinstance(part, Dataset) and len(part) == 0:
            return empty(features)
        if isinstance(part, Dataset):
            return _pack_table(part, layout, keep_remainder, batch_size, num_proc, features)
        return _pack_stream(part, layout, keep_remainder, per_shard, batch_size, features)

    return for_each_split(dataset, pack_one)


class _Layout(NamedTuple):
    """How rows are built. `capacity`: tokens of the document sequence (text and separators) in one row."""

    capacity: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    separator: int | None
    word_ids: bool


class _Stretch(NamedTuple):
    """Consecutive tokens of the document sequence: ids, word ids and document numbers, each of shape [n]."""

    ids: np.ndarray
    words: np.ndarray
    documents: np.ndarray

    def cut(self, start: int, stop: int | None = None) -> _Stretch:
        return _Stretch(*(array[start:stop] for array in self))


def _stretch(rows: Mapping[str, Sequence[Any]], layout: _Layout, first_document: int) -> _Stretch:
    """Documents given as columns of arrays -> the stretch of the sequence that they make up, separators included."""
    arrays = {
        name: [np.asarray([] if row is None else row, dtype=np.int32) for row in column]
        for name, column in rows.items()
    }
    lengths = np.array([len(array) for array in arrays["input_ids"]], dtype=np.int64)
    flat = {name: np.concatenate(column) for name, column in arrays.items()}
    return _separated(flat["input_ids"], flat.get("word_ids"), lengths, layout, first_document)


def _separated(
    ids: np.ndarray, words: np.ndarray | None, lengths: np.ndarray, layout: _Layout, first_document: int
) -> _Stretch:
    """Flat tokens of documents of the given lengths -> the same with a separator after each document."""
    documents = np.repeat(np.arange(first_document, first_document + len(lengths)), lengths)
    if words is None:
        words = np.empty(0, dtype=np.int32)
    if layout.separator is not None:
        after = np.cumsum(lengths)
        ids = np.insert(ids, after, layout.separator)
        documents = np.insert(documents, after, np.arange(first_document, first_document + len(lengths)))
        words = np.insert(words, after, NO_WORD) if layout.word_ids else words
    return _Stretch(ids, words, documents)


def _rows(stretch: _Stretch, layout: _Layout, length: int) -> dict[str, np.ndarray]:
    """Cuts n * length tokens into n rows, [n, prefix + length + suffix], with word ids numbered per row."""
    ids = stretch.ids.reshape(-1, length)
    rows = {"input_ids": _enclose(ids, layout.prefix, layout.suffix)}
    if layout.word_ids:
        words, documents = stretch.words.reshape(-1, length), stretch.documents.reshape(-1, length)
        begins = np.ones(words.shape, dtype=bool)
        begins[:, 1:] = (words[:, 1:] != words[:, :-1]) | (documents[:, 1:] != documents[:, :-1])
        numbers = np.cumsum(begins & (words != NO_WORD), axis=1) - 1
        numbers[words == NO_WORD] = NO_WORD
        rows["word_ids"] = _enclose(numbers, [NO_WORD] * len(layout.prefix), [NO_WORD] * len(layout.suffix))
    return rows


def _enclose(block: np.ndarray, left: Sequence[int], right: Sequence[int]) -> np.ndarray:
    sides = [np.broadcast_to(np.array(side, dtype=np.int32), (len(block), len(side))) for side in (left, right)]
    return np.concatenate([sides[0], block.astype(np.int32, copy=False), sides[1]], axis=1)


def _pack_table(
    dataset: Dataset, layout: _Layout, keep_remainder: bool, batch_size: int, num_proc: int | None, features: Features
) -> Dataset:
    """Map-style packing: every batch of documents writes the rows whose last token it holds.

    The beginning of its first row may lie in earlier documents; it is looked up in the dataset, so that batches do not
    depend on each other and can run in any process.
    """
    from datasets.fingerprint import Hasher

    extra = layout.separator is not None
    ends = np.cumsum(document_lengths(dataset) + extra)  # where each document ends in the sequence
    source = dataset.with_format("arrow")
    return source.map(
        _pack_batch,
        with_indices=True,
        batched=True,
        batch_size=batch_size,
        remove_columns=dataset.column_names,
        features=features,
        fn_kwargs={"source": source, "ends": ends, "layout": layout, "keep_remainder": keep_remainder},
        # Spares hashing the whole dataset, which is an argument of the function.
        new_fingerprint=Hasher.hash(("pack", fingerprint(dataset), layout, keep_remainder)),
        num_proc=num_proc,
        desc="Packing",
    ).with_format(None)


def _pack_batch(
    batch: pa.Table, indices: Sequence[int], source: Dataset, ends: np.ndarray, layout: _Layout, keep_remainder: bool
) -> pa.Table:
    import pyarrow as pa

    capacity = layout.capacity
    first, last = indices[0], indices[-1]
    begin = int(ends[first - 1]) if first > 0 else 0
    end = int(ends[last])
    start = begin // capacity * capacity  # of the first row that is not complete before this batch
    tail = end % capacity if keep_remainder and last == len(ends) - 1 else 0
    full = (end - start) // capacity * capacity

    rows: list[dict[str, np.ndarray]] = []
    if full or tail:
        first_document = int(np.searchsorted(ends, start, side="right"))
        table = source[first_document : last + 1]
        offset = start - (int(ends[first_document - 1]) if first_document > 0 else 0)
        stretch = _table_stretch(table, layout, first_document).cut(offset)
        rows.append(_rows(stretch.cut(0, full), layout, capacity))
        if tail:
            rows.append(_rows(stretch.cut(full), layout, tail))
    return pa.table(
        {
            name: pa.chunked_array([_list_array(part[name]) for part in rows], type=pa.list_(pa.int32()))
            for name in batch.column_names
        }
    )


def _table_stretch(table: pa.Table, layout: _Layout, first_document: int) -> _Stretch:
    flat = {name: _flat(table.column(name)) for name in table.column_names}
    return _separated(
        flat["input_ids"], flat.get("word_ids"), list_lengths(table.column("input_ids")), layout, first_document
    )


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False)


def _list_array(rows: np.ndarray) -> pa.ListArray:
    import pyarrow as pa

    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))


def _pack_stream(
    dataset: IterableDataset,
    layout: _Layout,
    keep_remainder: bool,
    per_shard: bool,
    batch_size: int,
    features: Features,
) -> IterableDataset:
    from datasets import IterableDataset

    count = dataset.num_shards
    # `datasets` calls the generator once for every entry of a list; the other arguments must not be lists.
    shards = [dataset.shard(count, index) for index in range(count)] if per_shard else [dataset]
    return IterableDataset.from_generator(
        _stream_rows,
        features=features,
        gen_kwargs={"shards": shards, "layout": layout, "keep_remainder": keep_remainder, "batch_size": batch_size},
    )


def _stream_rows(
    shards: list[IterableDataset], layout: _Layout, keep_remainder: bool, batch_size: int
) -> Iterator[dict[str, list[int]]]:
    (shard,) = shards
    rest: _Stretch | None = None
    document = 0
    # `iter` and not `for row in shard`: the latter would divide the shard once more among the loader's workers.
    for batch in shard.iter(batch_size):
        new = _stretch(batch, layout, document)
        document += len(batch["input_ids"])
        rest = new if rest is None else _Stretch(*(np.concatenate(pair) for pair in zip(rest, new, strict=True)))
        full = len(rest.ids) // layout.capacity * layout.capacity
        yield from _single_rows(_rows(rest.cut(0, full), layout, layout.capacity))
        rest = rest.cut(full)
    if keep_remainder and rest is not None and len(rest.ids):
        yield from _single_rows(_rows(rest, layout, len(rest.ids)))


def _single_rows(rows: Mapping[str, np.ndarray]) -> Iterator[dict[str, list[int]]]:
    for values in zip(*(column.tolist() for column in rows.values()), strict=True):
        yield dict(zip(rows, values, strict=True))


def _separator_id(tokenizer: PreTrainedTokenizerBase) -> int:
    for role in ("eos", "sep"):
        token_id = getattr(tokenizer, f"{role}_token_id", None)
        if token_id is not None:
            return int(token_id)
    raise ValueError(
        f"{type(tokenizer).__name__} has neither an eos nor a sep token to separate documents with; add one with "
        "load_tokenizer(..., add_missing=['sep']) or set separate_documents=False"
    )


def _row_special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer puts before and after a text, read off an example."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare and len(dressed) > len(bare):
            return tuple(dressed[:start]), tuple(dressed[start + len(bare) :])
    raise ValueError(
        f"{type(tokenizer).__name__} puts no special tokens around a text, so rows cannot have them; "
        "set add_special_tokens=False, or train the tokenizer with template='cls_sep'"
    )
