"""Attention with terms of its own, block by block and tile by tile, against the scores laid out in one matrix."""

import itertools

import pytest
import torch
from torch import Tensor

from hf_xformers.ops.score_terms import blocks as term_attention
from hf_xformers.ops.score_terms import diagonal as diagonal_attention
from hf_xformers.ops.score_terms.reference import diagonal_attention_reference, term_attention_reference
from hf_xformers.ops.score_terms.terms import Blocks, ScoreTerms
from tests.ops.linear_forms import numbers

BATCH, HEADS, WIDTH, FURTHER = 2, 4, 6, 3


class Pairs(ScoreTerms):
    """Who sees whom among `length` queries, the last of `keys` slots; real: [B, keys]."""

    ordered = False

    def __init__(self, length: int, keys: int, ordered: bool, real: Tensor | None = None) -> None:
        super().__init__(1.0, (), length, keys)
        self.ordered, self.real = ordered, real

    def hidden(self, rows: slice, keys: slice) -> Tensor | None:
        return None if self.real is None else ~self.real[:, None, None, keys]

    def seen(self) -> Tensor:
        """[B, 1, T, S], pair by pair."""
        result = torch.ones(BATCH, 1, self.num_queries, self.num_keys, dtype=torch.bool)
        for b in range(BATCH):
            for i in range(self.num_queries):
                for j in range(self.num_keys):
                    late = self.ordered and j > self.num_keys - self.num_queries + i
                    result[b, 0, i, j] = not late and (self.real is None or bool(self.real[b, j]))
        return result


class Products(Pairs):
    """term_ij = |tanh(q_i W)| . tanh(k_j U) + a table [H, T, S] + sin of numbers by distance [H, T + S - 1, 1], with
    values from another table if `has_values`."""

    def by_query(self, query, tables):
        return (torch.tanh(query @ tables[0]),)

    def by_key(self, key, tables):
        return (torch.tanh(key @ tables[1]),)

    def by_distance(self, tables):
        return (torch.sin(tables[3])[None],)

    def scores(self, block, tables):
        products = block.by_query[0].abs() @ block.by_key[0].take(0, block.keys).mT
        count, first = block.query.shape[2], tables[2].shape[1] - block.rows.stop
        line = block.by_distance[0].take(first, first + count + block.keys - 1)[..., 0]
        distance = torch.arange(block.keys)[None] - torch.arange(count)[:, None] + count - 1
        products = products + line[:, :, distance]
        return products + tables[2][None, :, block.rows, : block.keys] + block.query.sum(-1, keepdim=True)

    def values(self, weights, tables, rows):
        return weights @ tables[4][:, : weights.shape[-1]]


def literal(query, key, value, scores, seen, added=None):
    scores = (query @ key.mT + scores).masked_fill(~seen, -1e300)
    weights = torch.softmax(scores, -1) * seen.any(-1, keepdim=True)
    output = weights @ value
    return output if added is None else output + weights @ added


def check(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    probe = numbers(*expected.shape, seed=9).detach()
    ours, theirs = (torch.autograd.grad((x * probe).sum(), leaves, retain_graph=True) for x in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


def padding(keys: int) -> Tensor:
    """The second row is padding in front, and the queries there see nothing in order."""
    real = torch.ones(BATCH, keys, dtype=torch.bool)
    real[0, -2:], real[1, : keys - 3] = False, False
    return real


CASES = list(itertools.product(((7, 7), (5, 9)), (False, True), (False, True)))  # sizes, ordered, padded
BLOCKS = [Blocks(HEADS, 16), Blocks(1, 3), Blocks(3, 2)]
VALUES_AND_KERNELS = list(itertools.product((False, True), repeat=2))  # terms of values, the fused kernel
PARTS = ["line", "products", "shared products", "line, products", "line, shared products", "nothing"]


def each_pair(ways):
    """Cases and ways, each pair of them with one way to cut the work, such that each meets all of these."""
    return [(*case, way, BLOCKS[(i + j) % 3]) for i, case in enumerate(CASES) for j, way in enumerate(ways)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(term_attention, "TILE_SCORES", 4)
    monkeypatch.setattr(term_attention, "LEAST_COLUMNS", 2)
    monkeypatch.setattr(diagonal_attention, "TILE_SCORES", 4)
    monkeypatch.setattr(diagonal_attention, "LEAST_COLUMNS", 2)


@pytest.mark.parametrize("sizes, ordered, padded, way, blocks", each_pair(VALUES_AND_KERNELS))
def test_terms_equal_the_matrix(sizes, ordered, padded, way, blocks, monkeypatch):
    (length, keys), (with_values, fused) = sizes, way
    if not fused:
        monkeypatch.setattr(term_attention, "_fused_forward", None)
    query = numbers(BATCH, HEADS, length, WIDTH)
    key, value = numbers(BATCH, HEADS, keys, WIDTH, seed=1), numbers(BATCH, HEADS, keys, WIDTH, seed=2)
    tables = (
        numbers(1, WIDTH, FURTHER, seed=3),
        numbers(HEADS, WIDTH, FURTHER, seed=4),
        numbers(HEADS, length, keys, seed=5),
        numbers(HEADS, length + keys - 1, 1, seed=7),
        numbers(HEADS, keys, WIDTH, seed=6),
    )[: 5 if with_values else 4]
    terms = Products(length, keys, ordered, padding(keys) if padded else None)
    terms.has_values = with_values
    found = term_attention.term_attention(query, key, value, tables, terms, blocks)
    scores = torch.tanh(query @ tables[0]).abs() @ torch.tanh(key @ tables[1]).mT
    distance = torch.arange(keys)[None] - torch.arange(length)[:, None]
    scores = scores + tables[2] + query.sum(-1, keepdim=True) + torch.sin(tables[3])[:, distance + length - 1, 0]
    expected = literal(query, key, value, scores, terms.seen(), tables[4] if with_values else None)
    check(found, expected, [query, key, value, *tables])
    check(term_attention_reference(query, key, value, tables, terms), expected, [query, key, value, *tables])


@pytest.mark.parametrize("sizes, ordered, padded, parts, blocks", each_pair(PARTS))
def test_diagonals_equal_the_matrix(sizes, ordered, padded, parts, blocks):
    length, keys = sizes
    query = numbers(BATCH, HEADS, length, WIDTH)
    key, value = numbers(BATCH, HEADS, keys, WIDTH, seed=1), numbers(BATCH, HEADS, keys, WIDTH, seed=2)
    size = 1 if "shared" in parts else BATCH
    further = (numbers(size, HEADS, length, FURTHER, seed=3), numbers(size, HEADS, keys, FURTHER, seed=4))
    line = numbers(HEADS, length + keys - 1, seed=5)
    pairs = Pairs(length, keys, ordered, padding(keys) if padded else None)
    leaves, scores = [query, key, value], torch.zeros(1, 1, length, keys, dtype=torch.float64)
    if "products" in parts:
        leaves += further
        scores = scores + further[0] @ further[1].mT
    if "line" in parts:
        leaves.append(line)
        distance = torch.arange(keys)[None] - torch.arange(length)[:, None]
        scores = scores + line[:, distance + length - 1]
    given = (
        *(query, key, value),
        further if "products" in parts else None,
        line if "line" in parts else None,
        pairs,
    )
    expected = literal(query, key, value, scores, pairs.seen())
    check(diagonal_attention.diagonal_attention(*given, blocks), expected, leaves)
    check(diagonal_attention_reference(*given), expected, leaves)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_a_row_of_padding_alone(blocks):
    """Zeros, and no gradient, of both engines and their literal forms."""
    query, key, value = (numbers(BATCH, HEADS, 5, WIDTH, seed=seed) for seed in range(3))
    real = torch.ones(BATCH, 5, dtype=torch.bool)
    real[1] = False
    line, tables = numbers(HEADS, 9, seed=5), (numbers(1, WIDTH, FURTHER), numbers(1, WIDTH, FURTHER))
    tables = (*tables, numbers(HEADS, 5, 5, seed=6), numbers(HEADS, 9, 1, seed=7))
    for ordered in (False, True):
        terms = Products(5, 5, ordered, real)
        diagonal = (query, key, value, None, line, terms)
        for found, expected, leaves in (
            (
                diagonal_attention.diagonal_attention(*diagonal, blocks),
                diagonal_attention_reference(*diagonal),
                [query, key, value, line],
            ),
            (
                term_attention.term_attention(query, key, value, tables, terms, blocks),
                term_attention_reference(query, key, value, tables, terms),
                [query, key, value, *tables],
            ),
        ):
            assert not found[1].any() and not expected[1].any()
            check(found, expected, leaves)


def test_no_second_derivative():
    inputs = [numbers(1, 1, 3, WIDTH, seed=seed) for seed in range(3)]
    output = diagonal_attention.diagonal_attention(*inputs, None, None, Pairs(3, 3, False), Blocks(1, 2))
    with pytest.raises(RuntimeError, match="no second derivative .*attn_implementation='eager'"):
        torch.autograd.grad(output.sum(), inputs[0], create_graph=True)
