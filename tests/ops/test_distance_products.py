"""Products with vectors by distance against a loop over pairs."""

import pytest
import torch

from hf_xformers.ops import distance_products as module
from hf_xformers.ops.distance_products import ByDistance, distance_products

HEADS, WIDTH = 3, 5


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def by_pairs(query, key, of_queries, of_keys, near):
    """q_i a_(j-i) + k_j b_(j-i), pair by pair."""
    (first, stop), length, keys = near, query.shape[2], key.shape[2]

    def vector(table: ByDistance, i: int, j: int) -> torch.Tensor:
        if j < first:
            return table.far[:, 0]
        if j >= stop:
            return table.far[:, 1]
        return table.near[:, length - 1 - i + j - first]

    rows = []
    for i in range(length):
        row = []
        for j in range(keys):
            score = torch.zeros(query.shape[:2], dtype=query.dtype)
            if of_queries is not None:
                score = score + (query[:, :, i] * vector(of_queries, i, j)).sum(-1)
            if of_keys is not None:
                score = score + (key[:, :, j] * vector(of_keys, i, j)).sum(-1)
            row.append(score)
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)


@pytest.mark.parametrize("near", [(0, 11), (2, 9), (0, 6), (5, 11), (4, 4)], ids=str)
@pytest.mark.parametrize("which", ["queries", "keys", "both"])
@pytest.mark.parametrize("table_heads", [1, HEADS])
@pytest.mark.parametrize("tile", [2, 64])
def test_products_equal_a_loop_over_pairs(near, which, table_heads, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE_KEYS", tile)
    length, keys = 4, 11
    query, key = numbers(2, HEADS, length, WIDTH, seed=1), numbers(2, HEADS, keys, WIDTH, seed=2)
    rows = length + near[1] - near[0] - 1
    tables = [
        ByDistance(numbers(table_heads, rows, WIDTH, seed=3 + i), numbers(table_heads, 2, WIDTH, seed=5 + i))
        for i in range(2)
    ]
    of_queries, of_keys = (None if which == "keys" else tables[0]), (None if which == "queries" else tables[1])
    found = distance_products(query, None if which == "queries" else key, of_queries, of_keys, near, keys)
    expected = by_pairs(query, key, of_queries, of_keys, near)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    probe = numbers(*expected.shape, seed=9).detach()
    leaves = [
        x
        for group in ((query,) * (which != "keys"), (key,) * (which != "queries"), of_queries, of_keys)
        for x in group or ()
    ]
    ours, theirs = (
        torch.autograd.grad((x * probe).sum(), leaves, allow_unused=True, materialize_grads=True)
        for x in (found, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_a_second_derivative_is_refused():
    query, key = numbers(1, 1, 2, WIDTH, seed=1), numbers(1, 1, 2, WIDTH, seed=2)
    table = ByDistance(numbers(1, 3, WIDTH, seed=3), numbers(1, 2, WIDTH, seed=4))
    (grad,) = torch.autograd.grad(
        distance_products(query, key, table, table, (0, 2), 2).sum(), query, retain_graph=True
    )
    assert grad.shape == query.shape
    with pytest.raises(RuntimeError, match="no second derivative.*eager"):
        torch.autograd.grad(distance_products(query, key, table, table, (0, 2), 2).sum(), query, create_graph=True)
