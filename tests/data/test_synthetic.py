"""Synthetic tasks: every label is the one answer that the row itself gives."""

import itertools

import numpy as np
import pytest
from datasets import Dataset

from hf_xformers.data import (
    associative_recall,
    byte_dataset,
    copy_task,
    disjoint,
    list_operations,
    needle_retrieval,
    state_tracking,
    two_hop_recall,
)


def columns(dataset):
    assert type(dataset) is Dataset and dataset.column_names == ["input_ids", "labels"]
    return np.array(dataset["input_ids"][:]), np.array(dataset["labels"][:])


def test_copy_task():
    ids, labels = columns(copy_task(200, length=7, vocab_size=12, seed=3))
    assert ids.shape == labels.shape == (200, 15)
    for row, target in zip(ids.tolist(), labels.tolist(), strict=True):
        assert row == [*row[:7], 1, *row[:7]]
        assert target == [-100] * 8 + row[:7]
    assert set(ids[:, :7].ravel()) == set(range(2, 12))


@pytest.mark.parametrize("length, num_pairs, vocab_size", [(5, 1, 4), (41, 10, 30), (64, 10, 22), (101, 4, 200)])
def test_associative_recall(length, num_pairs, vocab_size):
    ids, labels = columns(associative_recall(50, length, num_pairs, vocab_size, seed=1))
    assert ids.shape == labels.shape == (50, length)
    half = (vocab_size - 2) // 2
    for row, target in zip(ids.tolist(), labels.tolist(), strict=True):
        memory = dict(zip(row[0 : 2 * num_pairs : 2], row[1 : 2 * num_pairs : 2], strict=True))
        assert len(memory) == num_pairs
        assert set(memory) <= set(range(2, 2 + half)) and set(memory.values()) <= set(range(2 + half, 2 + 2 * half))
        assert row[2 * num_pairs] == 1
        asked = [position for position in range(length) if target[position] != -100]
        assert all(position > 2 * num_pairs for position in asked)
        # The answer to a key is scored at the next position, where the row also shows it.
        assert all(target[p] == row[p] == memory[row[p - 1]] for p in asked)
        assert sorted(row[p - 1] for p in asked) == sorted(memory)
        rest = set(range(2 * num_pairs + 1, length)) - {q for p in asked for q in (p - 1, p)}
        assert all(row[position] == 0 for position in rest)


@pytest.mark.parametrize("num_pairs, vocab_size", [(1, 5), (6, 20), (5, 50)])
def test_two_hop_recall(num_pairs, vocab_size):
    ids, labels = columns(two_hop_recall(60, num_pairs, vocab_size, seed=1))
    assert ids.shape == labels.shape == (60, 6 * num_pairs + 1)
    each, met = (vocab_size - 2) // 3, set()
    for row, target in zip(ids.tolist(), labels.tolist(), strict=True):
        links = dict(zip(row[0 : 4 * num_pairs : 2], row[1 : 4 * num_pairs : 2], strict=True))
        assert len(links) == 2 * num_pairs and row[4 * num_pairs] == 1
        keys = row[4 * num_pairs + 1 :: 2]
        assert sorted(keys) == sorted(key for key in links if key < 2 + each)
        answers = [links[links[key]] for key in keys]
        assert len(set(answers)) == num_pairs and min(answers) >= 2 + 2 * each
        assert row[4 * num_pairs + 2 :: 2] == answers == [label for label in target if label != -100]
        assert all(target[place] == row[place] for place in range(4 * num_pairs + 2, len(row), 2))
        met.add(row.index(links[keys[0]]) % 2)  # as a value, behind its key, or as a key before
    assert num_pairs == 1 or met == {0, 1}


@pytest.mark.parametrize("elements", [2, 3, 5])
def test_state_tracking(elements):
    ids, labels = columns(state_tracking(40, 9, elements, seed=2))
    group = list(itertools.permutations(range(elements)))
    for row, target in zip(ids.tolist(), labels.tolist(), strict=True):
        assert row[-1] == 0 and target[0] == -100
        state = tuple(range(elements))
        for token, label in zip(row[:-1], target[1:], strict=True):
            state = tuple(group[token - 2][element] for element in state)
            assert group[label - 2] == state
    assert set(ids[:, :-1].ravel()) == set(range(2, 2 + len(group))) or elements == 5
    if elements == 2:
        assert (labels[:, 1:] - 2 == (ids[:, :-1] - 2).cumsum(1) % 2).all()


def test_queries_come_soon_after_the_pairs_or_evenly():
    def slots(skew):
        _, labels = columns(associative_recall(400, 4 + 1 + 200, 2, 40, seed=2, skew=skew))
        return (np.nonzero(labels != -100)[1] - 6) // 2

    even, early = slots(1.0), slots(0.01)
    assert abs(even.mean() - 49.5) < 4 * 28.9 / 800**0.5
    assert early.mean() < 20
    # The first of two draws is slot i with probability w_i / sum(w); both orders together lie between this and twice
    # it.
    weights = np.arange(1, 101) ** (0.01 - 1)
    share = (early == 0).mean() * 2
    assert weights[0] / weights.sum() - 0.1 < share < 2 * weights[0] / weights.sum() + 0.1


def test_query_order_does_not_follow_the_pairs():
    ids, _ = columns(associative_recall(500, 9, 2, 20, seed=4))
    first_asked = ids[np.arange(500), 5]
    assert 0.4 < (first_asked == ids[:, 0]).mean() < 0.6


def test_byte_dataset(tmp_path):
    text = "Die Größe der Menge beträgt 12 €.\n" * 9
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    content = text.encode()
    ids, labels = columns(byte_dataset(tmp_path / "a.txt", 16))
    assert (ids == labels).all()
    assert bytes(ids.ravel().tolist()) == content[: len(content) // 16 * 16]
    train, validation = (
        byte_dataset(str(tmp_path / "a.txt"), 10, start=start, stop=stop) for start, stop in ((0, 0.8), (0.8, 1))
    )
    cut = round(0.8 * len(content))
    train, validation = (columns(part)[0].ravel().tolist() for part in (train, validation))
    assert bytes(train) == content[: cut // 10 * 10]
    assert bytes(validation) == content[cut:][: (len(content) - cut) // 10 * 10]


def test_a_seed_means_the_same_rows():
    for make in (
        lambda seed: copy_task(20, 5, 9, seed),
        lambda seed: associative_recall(20, 33, 4, 20, seed),
        lambda seed: list_operations(20, 33, seed),
        lambda seed: needle_retrieval(20, 33, seed=seed),
        lambda seed: two_hop_recall(20, 4, 20, seed),
        lambda seed: state_tracking(20, 9, 5, seed),
    ):
        first, again, other = (np.array(make(seed)["input_ids"][:]) for seed in (0, 0, 1))
        assert (first == again).all() and (first != other).any()
    # Frozen: benchmarks compare runs of different versions.
    assert copy_task(1, 6, 10, seed=0)["input_ids"][0] == [8, 7, 6, 4, 4, 2, 1, 8, 7, 6, 4, 4, 2]


def test_refusals(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh")
    cases = [
        (lambda: copy_task(0, 5, 9), "num_examples=0 is too small; take at least 1"),
        (lambda: copy_task(1, 0, 9), "length=0"),
        (lambda: copy_task(1, 5, 3), "vocab_size=3 is too small; take at least 4"),
        (lambda: associative_recall(0, 9, 2, 20), "num_examples=0"),
        (lambda: associative_recall(1, 9, 0, 20), "num_pairs=0"),
        (lambda: associative_recall(1, 8, 2, 20), "length=8 is too small; take at least 9"),
        (lambda: associative_recall(1, 9, 2, 5), "vocab_size=5 gives 1 keys for num_pairs=2 .*at least 6"),
        (lambda: associative_recall(1, 9, 2, 20, skew=0), "skew=0 must be greater than 0"),
        (lambda: list_operations(1, 3), "length=3 is too small; take at least 4"),
        (lambda: list_operations(1, 9, max_arguments=1), "max_arguments=1"),
        (lambda: list_operations(1, 100, max_depth=1), "max_depth=1 .* do not fill half of length=100"),
        (lambda: needle_retrieval(1, 3), "length=3"),
        (lambda: needle_retrieval(1, 9, num_values=1), "num_values=1 is too small; take at least 2"),
        (lambda: two_hop_recall(1, 0, 20), "num_pairs=0"),
        (lambda: two_hop_recall(1, 7, 22), "vocab_size=22 gives 6 keys for num_pairs=7 .*at least 23"),
        (lambda: state_tracking(1, 1, 2), "length=1"),
        (lambda: state_tracking(1, 9, 1), "elements=1"),
        (lambda: state_tracking(1, 9, 7), "elements=7 have 5040 permutations; take at most 6"),
        (lambda: byte_dataset(tmp_path / "a.txt", 0), "block_size=0"),
        (lambda: byte_dataset(tmp_path / "a.txt", 9), "has 8 bytes .* less than one block of block_size=9"),
        (lambda: byte_dataset(tmp_path / "a.txt", 4, start=0.5, stop=0.5), "start=0.5, stop=0.5"),
        (lambda: byte_dataset(tmp_path / "b.txt", 4), "there is no file .*b.txt"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def value_of(tokens):
    """Reads an expression of list operations by the letter, with a stack."""
    stack = []
    for token in tokens:
        if token == 16:
            arguments = []
            while not isinstance(stack[-1], str):
                arguments.append(stack.pop())
            assert len(arguments) >= 2
            name = stack.pop()
            result = {"MAX": max, "MIN": min, "MED": lambda a: int(np.median(a)), "SM": lambda a: sum(a) % 10}[name]
            stack.append(result(arguments))
        else:
            stack.append(("MAX", "MIN", "MED", "SM")[token - 12] if token >= 12 else token - 2)
    (value,) = stack
    return value


@pytest.mark.parametrize("length, depth", [(4, 1), (24, 2), (61, 5)])
def test_list_operations(length, depth):
    dataset = list_operations(150, length, seed=1, max_depth=depth)
    assert dataset.column_names == ["input_ids", "attention_mask", "labels"]
    for row in dataset:
        size = sum(row["attention_mask"])
        assert len(row["input_ids"]) == length and length / 2 <= size <= length
        assert row["attention_mask"] == [1] * size + [0] * (length - size) and not any(row["input_ids"][size:])
        assert value_of(row["input_ids"][:size]) == row["labels"]
        deepest = nested = 0
        for token in row["input_ids"][:size]:
            nested += (12 <= token <= 15) - (token == 16)
            deepest = max(deepest, nested)
        assert deepest <= depth
    if length > 4:
        assert set(dataset["labels"]) == set(range(10))


@pytest.mark.parametrize("length", [4, 5, 30])
def test_needle_retrieval(length):
    ids, labels = columns(needle_retrieval(200, length, num_values=6, seed=2))
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        (place,) = [position for position, token in enumerate(row) if token == 1]
        assert length // 4 <= place < length - 1 and row[place + 1] == 2 + label
        assert length < 8 or place + 1 < length - length // 4 + 1
        assert set(row) <= {1, *range(2, 8)}
    assert set(labels.tolist()) == set(range(6))


def test_disjoint_parts():
    train, held_out = disjoint(lambda n, seed: copy_task(n, 4, 5, seed), 40, 30, seed=3)  # 81 rows in all
    rows = [tuple(row) for row in held_out["input_ids"]]
    assert len(train) == 40 and len(rows) == len(set(rows)) == 30
    assert not set(rows) & {tuple(row) for row in train["input_ids"]}
    again = disjoint(lambda n, seed: copy_task(n, 4, 5, seed), 40, 30, seed=3)[1]
    assert again["input_ids"][:] == held_out["input_ids"][:]
    with pytest.raises(ValueError, match="no 30 rows besides the 40 of training"):
        disjoint(lambda n, seed: copy_task(n, 2, 5, seed), 40, 30)
