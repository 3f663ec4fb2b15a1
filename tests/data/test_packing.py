"""Tokenising and packing against a loop over tokens: no token lost, repeated or moved, on every road."""

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from hf_xformers.data import document_lengths, pack, tokenize_dataset, train_tokenizer

SEP = 3


def random_documents(seed, count=60, longest=40):
    """Tokenised documents: empty ones, short ones and one much longer than any block, with word ids."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, size=count)
    lengths[count // 2] = 500
    ids = [random.integers(5, 600, size=n).tolist() for n in lengths]
    words = [np.cumsum(random.random(n) < 0.5).tolist() for n in lengths]
    return ids, words


def dataset_of(ids, words=None):
    columns = {"input_ids": ids} if words is None else {"input_ids": ids, "word_ids": words}
    return Dataset.from_dict({**columns, "other": list(range(len(ids)))})


def literal_rows(ids, words, block_size, prefix=(), suffix=(), separator=SEP, keep_remainder=False):
    """(input_ids, word_ids) of every row, by one loop over tokens."""
    room = block_size - len(prefix) - len(suffix)
    sequence = []
    for number, (document, document_words) in enumerate(zip(ids, words, strict=True)):
        sequence += [(token, (number, word)) for token, word in zip(document, document_words, strict=True)]
        if separator is not None:
            sequence.append((separator, None))
    rows = []
    for start in range(0, len(sequence), room):
        part = sequence[start : start + room]
        if len(part) < room and not keep_remainder:
            break
        names, last, units = {}, None, []
        for _, word in part:
            if word is None:
                units.append(-1)
            else:
                if word != last:
                    names[word] = len(names)
                units.append(names[word])
            last = word
        rows.append(
            (
                [*prefix, *(token for token, _ in part), *suffix],
                [*([-1] * len(prefix)), *units, *([-1] * len(suffix))],
            )
        )
    return rows


def packed(dataset):
    return [(row["input_ids"], row["word_ids"]) for row in dataset]


@pytest.mark.parametrize("keep_remainder", [False, True])
@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("block_size", [3, 16, 5000])
def test_rows_equal_the_literal_ones(tokenizer, block_size, separate, specials, keep_remainder):
    ids, words = random_documents(block_size)
    dataset = dataset_of(ids, words)
    row = {"prefix": (2,), "suffix": (3,)} if specials else {}
    expected = literal_rows(
        ids, words, block_size, separator=SEP if separate else None, keep_remainder=keep_remainder, **row
    )
    options = {
        "tokenizer": tokenizer,
        "separate_documents": separate,
        "add_special_tokens": specials,
        "keep_remainder": keep_remainder,
        "word_ids": True,
    }
    for batch_size in (1, 7, 1000):
        for given in (dataset, dataset.to_iterable_dataset(num_shards=3)):
            rows = pack(given, block_size, batch_size=batch_size, **options)
            assert packed(rows) == expected
            assert rows.column_names == ["input_ids", "word_ids"]
    assert expected or block_size == 5000


def test_without_word_ids_and_in_several_processes(tokenizer):
    ids, words = random_documents(1)
    expected = [row for row, _ in literal_rows(ids, words, 32, keep_remainder=True)]
    for options in ({}, {"num_proc": 2}, {"num_proc": 3, "batch_size": 4}):
        rows = pack(dataset_of(ids), 32, tokenizer=tokenizer, keep_remainder=True, **options)
        assert rows["input_ids"][:] == expected
        assert rows.column_names == ["input_ids"]


def test_reordered_and_joined_datasets(tokenizer):
    ids, words = random_documents(2)
    order = np.random.default_rng(0).permutation(len(ids)).tolist()
    dataset = dataset_of(ids, words)
    joined = concatenate_datasets([dataset.select(order), dataset.select(range(10))]).with_format("numpy")
    picked = order + list(range(10))
    expected = literal_rows([ids[i] for i in picked], [words[i] for i in picked], 24)
    rows = pack(joined, 24, tokenizer=tokenizer, word_ids=True, batch_size=9)
    assert packed(rows) == expected


def test_splits_and_nothing_to_pack(tokenizer):
    ids, words = random_documents(3)
    splits = DatasetDict({"train": dataset_of(ids), "validation": dataset_of(ids[:20])})
    rows = pack(splits, 16, tokenizer=tokenizer)
    assert type(rows) is DatasetDict and list(rows) == ["train", "validation"]
    assert rows["validation"]["input_ids"][:] == [row for row, _ in literal_rows(ids[:20], words[:20], 16)]
    streams = pack(
        datasets.IterableDatasetDict({name: part.to_iterable_dataset() for name, part in splits.items()}),
        16,
        tokenizer=tokenizer,
    )
    assert type(streams) is datasets.IterableDatasetDict
    assert [row["input_ids"] for row in streams["train"]] == rows["train"]["input_ids"][:]
    for part in ([[]], [[5]], [[], []]):
        for dataset in (
            Dataset.from_dict({"input_ids": part}),
            Dataset.from_dict({"input_ids": part}).to_iterable_dataset(),
        ):
            assert list(pack(dataset, 8, tokenizer=tokenizer)) == []
            tail = sum(len(document) + 1 for document in part)
            kept = list(pack(dataset, 8, tokenizer=tokenizer, keep_remainder=True))
            assert [len(row["input_ids"]) for row in kept] == [tail]


@pytest.mark.parametrize("keep_remainder", [False, True])
def test_shards_packed_one_by_one_for_workers_and_nodes(tokenizer, keep_remainder):
    ids, words = random_documents(4)
    given = dataset_of(ids, words).to_iterable_dataset(num_shards=4)
    stream = pack(given, 16, tokenizer=tokenizer, word_ids=True, keep_remainder=keep_remainder, per_shard=True)
    assert stream.num_shards == 4
    expected = [
        literal_rows(ids[start : start + 15], words[start : start + 15], 16, keep_remainder=keep_remainder)
        for start in range(0, 60, 15)
    ]
    everything = [row for shard in expected for row in shard]
    assert packed(stream) == everything
    loader = DataLoader(stream, batch_size=None, num_workers=2, collate_fn=dict)
    assert sorted(packed(loader)) == sorted(everything)
    nodes = [packed(split_dataset_by_node(stream, rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(nodes[0] + nodes[1]) == sorted(everything)


def test_one_sequence_for_one_worker(tokenizer):
    ids, words = random_documents(4)
    stream = pack(dataset_of(ids, words).to_iterable_dataset(num_shards=4), 16, tokenizer=tokenizer, word_ids=True)
    loader = DataLoader(stream, batch_size=None, num_workers=1, collate_fn=dict)
    assert packed(loader) == packed(stream) == literal_rows(ids, words, 16)
    nodes = [packed(split_dataset_by_node(stream, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(row for node in nodes for row in node) == sorted(packed(stream))


def test_stream_split_by_node_before_packing(tokenizer):
    ids, words = random_documents(5)
    total = []
    for rank in range(2):
        node = split_dataset_by_node(dataset_of(ids, words).to_iterable_dataset(num_shards=4), rank=rank, world_size=2)
        total += [t for row in pack(node, 16, tokenizer=tokenizer, keep_remainder=True) for t in row["input_ids"]]
    assert sorted(total) == sorted(token for document in ids for token in [*document, SEP])


@pytest.mark.parametrize("streaming", [False, True])
def test_other_column_types_missing_rows_and_no_rows(tokenizer, streaming):
    wide = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int64"))})
    dataset = Dataset.from_dict({"input_ids": [[5, 6], None, [], [7]]}, features=wide)
    given = dataset.to_iterable_dataset() if streaming else dataset
    rows = list(pack(given, 3, tokenizer=tokenizer, keep_remainder=True))
    assert [row["input_ids"] for row in rows] == [[5, 6, 3], [3, 3, 7], [3]]
    empty = tokenize_dataset(Dataset.from_dict({"text": []}), tokenizer, word_ids=True)
    assert empty.column_names == ["input_ids", "word_ids"]
    none = pack(empty, 3, tokenizer=tokenizer, word_ids=True, keep_remainder=True)
    assert none.column_names == ["input_ids", "word_ids"] and len(none) == 0


def test_stream_can_be_read_again_and_resumed(tokenizer):
    ids, _ = random_documents(6)
    stream = pack(dataset_of(ids).to_iterable_dataset(), 16, tokenizer=tokenizer)
    first = [row["input_ids"] for row in stream]
    assert first == [row["input_ids"] for row in stream]
    iterator = iter(stream)
    for _ in range(5):
        next(iterator)
    fresh = pack(dataset_of(ids).to_iterable_dataset(), 16, tokenizer=tokenizer)
    fresh.load_state_dict(stream.state_dict())
    assert [row["input_ids"] for row in fresh] == first[5:]


def test_packing_is_cached_like_any_map(tokenizer, tmp_path):
    ids, _ = random_documents(7)
    dataset_of(ids).to_parquet(str(tmp_path / "a.parquet"))
    source = Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))

    def fingerprint(block_size, **options):
        rows = pack(source, block_size, tokenizer=tokenizer, **options)
        return rows._fingerprint, len(list((tmp_path / "cache").rglob("cache-*.arrow")))

    first, files = fingerprint(16)
    assert files > 0
    assert fingerprint(16) == (first, files)
    others = [fingerprint(17), fingerprint(16, keep_remainder=True), fingerprint(16, separate_documents=False)]
    assert len({first, *(other for other, _ in others)}) == 4
    again = pack(source, 16, tokenizer=tokenizer)
    assert again["input_ids"][:] == [row for row, _ in literal_rows(ids, ids, 16)]


def test_from_text_to_rows_and_back(tokenizer, corpus):
    dataset = Dataset.from_dict({"text": corpus})
    rows = pack(tokenize_dataset(dataset, tokenizer), 128, tokenizer=tokenizer, keep_remainder=True)
    assert [len(row) for row in rows["input_ids"][:-1]] == [128] * (len(rows) - 1)
    text = tokenizer.decode([token for row in rows["input_ids"] for token in row])
    assert text == "".join(document + "[SEP]" for document in corpus)


# --- tokenising ----------------------------------------------------------------------------------------------------


def test_tokenising_is_cached_and_the_same_in_several_processes(tokenizer, corpus):
    dataset = Dataset.from_dict({"text": corpus})
    first, again, other = (tokenize_dataset(dataset, tokenizer, word_ids=words) for words in (True, True, False))
    assert first._fingerprint == again._fingerprint != other._fingerprint
    assert tokenize_dataset(dataset, tokenizer, word_ids=True, num_proc=2)[:] == first[:]


@pytest.mark.parametrize("streaming", [False, True])
def test_tokenize_dataset(corpus, streaming):
    wordpiece = train_tokenizer(corpus[:10], "wordpiece", 300, num_sentinels=0)
    dataset = Dataset.from_dict({"body": corpus[:10], "n": range(10)})
    given = dataset.to_iterable_dataset() if streaming else dataset
    for options in ({}, {"add_special_tokens": True}, {"add_special_tokens": True, "max_length": 20}):
        rows = list(tokenize_dataset(given, wordpiece, text_column="body", word_ids=True, **options))
        for row, text in zip(rows, corpus[:10], strict=True):
            alone = wordpiece(text, truncation="max_length" in options, **{"add_special_tokens": False, **options})
            assert row["input_ids"] == alone["input_ids"]
            assert row["word_ids"] == [-1 if word is None else word for word in alone.word_ids()]
            # A piece that continues a word, and only such a piece, has the word id of the piece before.
            pieces = wordpiece.convert_ids_to_tokens(row["input_ids"])
            for piece, before, word in zip(pieces[1:], row["word_ids"], row["word_ids"][1:], strict=False):
                assert (word == before) == piece.startswith("##")
    bare = tokenize_dataset(given, wordpiece, text_column="body")
    assert bare.column_names == ["input_ids"]


def test_tokenize_splits_of_unknown_columns(tokenizer):
    def rows():
        yield {"text": "one text"}
        yield {"text": "another"}

    splits = datasets.IterableDatasetDict({"train": IterableDataset.from_generator(rows)})
    tokens = tokenize_dataset(splits, tokenizer)
    assert [row["input_ids"] for row in tokens["train"]] == [
        tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows()
    ]


def test_document_lengths():
    ids, _ = random_documents(8)
    dataset = dataset_of(ids).select(range(59, -1, -1))
    lengths = document_lengths(dataset)
    assert lengths.dtype == np.int64 and lengths.tolist() == [len(document) for document in ids[::-1]]
    assert document_lengths(dataset.select([])).tolist() == []
    with pytest.raises(ValueError, match="no column 'labels'"):
        document_lengths(dataset, "labels")


# --- refusals ------------------------------------------------------------------------------------------------------


def test_refusals(tokenizer):
    dataset = dataset_of([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"block_size=2 leaves no room .* 2 special tokens of a row; take at least 3"):
        pack(dataset, 2, tokenizer=tokenizer, add_special_tokens=True)
    with pytest.raises(ValueError, match=r"block_size=0 .*take at least 1"):
        pack(dataset, 0, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="batch_size=0"):
        pack(dataset, 8, tokenizer=tokenizer, batch_size=0)
    for given in (dataset, dataset.to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"no column 'word_ids', only .*tokenize_dataset\(..., word_ids=True\)"):
            pack(given, 8, tokenizer=tokenizer, word_ids=True)
        with pytest.raises(ValueError, match="no column 'text' to tokenize; its columns are"):
            tokenize_dataset(given, tokenizer)

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
    with pytest.raises(ValueError, match=r"neither an eos nor a sep token.*separate_documents=False"):
        pack(dataset, 8, tokenizer=bare)
    with pytest.raises(ValueError, match=r"puts no special tokens around a text.*template='cls_sep'"):
        pack(dataset, 8, tokenizer=bare, separate_documents=False, add_special_tokens=True)
    assert pack(dataset, 3, tokenizer=bare, separate_documents=False)["input_ids"][:] == [[5, 6, 7]]

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="word_ids needs a fast tokenizer and Slow is a slow one"):
        tokenize_dataset(dataset, Slow(), word_ids=True)


def test_row_specials_follow_the_template(corpus, tokenizer):
    dataset = dataset_of([[7] * 10])
    for template, first in (("bos", [2, 7, 7, 7]), ("eos", [7, 7, 7, 3])):
        other = train_tokenizer(corpus[:5], "bpe", 300, num_sentinels=0, template=template)
        rows = pack(dataset, 4, tokenizer=other, add_special_tokens=True)
        assert rows["input_ids"][0] == first
    assert pack(dataset, 4, tokenizer=tokenizer, add_special_tokens=True)["input_ids"][0] == [2, 7, 7, 3]
