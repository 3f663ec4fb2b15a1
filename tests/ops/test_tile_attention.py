"""Attention over tiles against the literal form, and that against a loop over the pairs of all tiles."""

import pytest
import torch

from hf_xformers.ops.score_terms import tiles as module
from hf_xformers.ops.score_terms.attention import tile_attention
from hf_xformers.ops.score_terms.reference import tile_attention_reference
from hf_xformers.ops.score_terms.terms import ScoreTerms, Tiles
from tests.ops.linear_forms import numbers

BATCH, HEADS, LENGTH, KEYS, WIDTH, FURTHER = 2, 3, 7, 9, 4, 2


class Products(ScoreTerms):
    """term_ij = tanh(q_i W) . tanh(k_j U) + tanh(i + 2 j), and what it adds to the output: weight_ij u_h."""

    def __init__(self):
        super().__init__(1.0, (), LENGTH, KEYS)

    def by_query(self, query, tables):
        return (torch.tanh(query @ tables[0]),)

    def by_key(self, key, tables):
        return (torch.tanh(key @ tables[1]),)

    def pairs(self, pairs, tables):
        places = pairs.query_at[..., :, None] + 2 * pairs.key_at[..., None, :]
        return pairs.by_query[0] @ pairs.by_key[0].mT + torch.tanh(places.double())

    def pair_values(self, weights, pairs, tables):
        return weights.sum(-1, keepdim=True) * tables[2][:, None, None]


def inputs():
    states = (
        numbers(BATCH, HEADS, LENGTH, WIDTH, seed=1),
        *(numbers(BATCH, HEADS, KEYS, WIDTH, seed=n) for n in (2, 3)),
    )
    tables = (
        numbers(HEADS, WIDTH, FURTHER, seed=4),
        numbers(1, WIDTH, FURTHER, seed=5),
        numbers(HEADS, WIDTH, seed=6),
    )
    return states, tables


def rounds(own_score: float | None) -> list[list[Tiles]]:
    """Two rounds of two tiles each, the second of other tiles for each row and head; the second row of the batch is
    padding alone, and the last query stands in no tile."""
    generator, offset = torch.Generator().manual_seed(0), KEYS - LENGTH
    real = torch.ones(BATCH, KEYS, dtype=torch.bool)
    real[0, :3], real[1] = False, False
    made = []
    for size in ((1, 1), (BATCH, HEADS)):
        query_at = torch.stack(
            [torch.randperm(LENGTH - 1, generator=generator) for _ in range(size[0] * size[1])]
        ).view(*size, 2, 3)
        query_at[..., 1, 2] = -1
        key_at = torch.stack([torch.randperm(KEYS, generator=generator)[:8] for _ in range(size[0] * size[1])]).view(
            *size, 2, 4
        )
        allowed = torch.rand(BATCH, size[1], 2, 3, 4, generator=generator) < 0.8
        seen = torch.stack([real[b][key_at[b if size[0] > 1 else 0]] for b in range(BATCH)])
        made.append([Tiles(query_at, key_at, allowed & seen[..., None, :], own_score, offset)])
    return made


def by_pairs(query, key, value, tables, terms, tiled):
    """One pair after another."""
    output = torch.zeros_like(query)
    first, second = terms.by_query(query, tables)[0], terms.by_key(key, tables)[0]
    for b, h, i in ((b, h, i) for b in range(BATCH) for h in range(HEADS) for i in range(LENGTH)):
        masses, reads = [], []
        for each in (each for several in tiled for each in several):
            (rows, columns), allowed = (
                (x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0] for x in (each.query_at, each.key_at)),
                each.allowed[b if each.allowed.shape[0] > 1 else 0, h if each.allowed.shape[1] > 1 else 0],
            )
            for n, t in (rows == i).nonzero().tolist():
                for s in allowed[n, t].nonzero().flatten().tolist():
                    j = int(columns[n, s])
                    score = query[b, h, i] @ key[b, h, j] + first[b, h, i] @ second[b, h, j]
                    score = score + torch.tanh(torch.tensor(i + 2.0 * j, dtype=torch.float64))
                    if each.own_score is not None and j == i + each.offset:
                        score = torch.full_like(score, each.own_score)
                    masses.append(score)
                    reads.append(value[b, h, j] + (tables[2][h] if terms.has_values else 0.0))
        if masses:
            output[b, h, i] = torch.softmax(torch.stack(masses), 0) @ torch.stack(reads)
    return output


@pytest.mark.parametrize("own_score", [None, -1e5])
@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("heads_at_once", [1, HEADS])
def test_engine_and_literal_form_equal_the_pairs(own_score, with_values, heads_at_once, monkeypatch):
    monkeypatch.setattr(module, "tiled_heads_at_once", lambda batch, rounds: heads_at_once)
    states, tables = inputs()
    terms, tiled = Products(), rounds(own_score)
    terms.has_values = with_values
    tables = tables if with_values else tables[:2]
    leaves = (*states, *tables)
    expected = by_pairs(*states, tables, terms, tiled)
    probe = numbers(*expected.shape, seed=9).detach()
    slopes = torch.autograd.grad((expected * probe).sum(), leaves)
    for attend in (tile_attention, tile_attention_reference):
        found = attend(*states, tables, terms, tiled)
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
        assert not found[1].any() and not found[:, :, -1].any()
        for ours, theirs in zip(torch.autograd.grad((found * probe).sum(), leaves), slopes, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
