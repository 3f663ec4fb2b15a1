"""Products with vectors by distance against a loop over pairs."""

from typing import NamedTuple

import pytest
import torch

from hf_xformers.ops.score_terms import distance_products as module
from hf_xformers.ops.score_terms.attention import distance_products
from hf_xformers.ops.score_terms.reference import distance_products_reference
from tests.ops.linear_forms import numbers

HEADS, WIDTH = 3, 5


class Table(NamedTuple):
    """Vectors by distance: near ones, and one for all earlier and one for all later keys."""

    near: torch.Tensor
    early: torch.Tensor
    late: torch.Tensor

    def laid(self, near: tuple[int, int], keys: int, far: bool = True) -> torch.Tensor:
        """As `distance_products` takes them for queries; for keys the other way round."""
        ends = (self.early[:, : far and near[0] > 0], self.near, self.late[:, : far and near[1] < keys])
        return torch.cat(ends, dim=1)


def by_pairs(query, key, of_queries, of_keys, near):
    """q_i a_(j-i) + k_j b_(j-i), pair by pair."""
    (first, stop), length, keys = near, query.shape[2], key.shape[2]

    def vector(table: Table, i: int, j: int) -> torch.Tensor:
        if j < first:
            return table.early[:, 0]
        if j >= stop:
            return table.late[:, 0]
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
@pytest.mark.parametrize("table_heads, tile, far", [(1, 2, True), (HEADS, 64, True), (HEADS, 2, False)])
def test_products_equal_a_loop_over_pairs(near, which, table_heads, tile, far, monkeypatch):
    monkeypatch.setattr(module, "LEAST_TILE", tile)
    length, keys = 4, 11
    query, key = numbers(2, HEADS, length, WIDTH, seed=1), numbers(2, HEADS, keys, WIDTH, seed=2)
    counts = (length + near[1] - near[0] - 1, 1, 1)
    tables = [
        Table(*(numbers(table_heads, n, WIDTH, seed=3 * i + part + 3) for part, n in enumerate(counts)))
        for i in range(2)
    ]
    if not far:
        tables = [table._replace(early=0 * table.early, late=0 * table.late) for table in tables]
    of_queries, of_keys = (None if which == "keys" else tables[0]), (None if which == "queries" else tables[1])
    given = (
        query,
        None if which == "queries" else key,
        None if of_queries is None else of_queries.laid(near, keys, far),
        None if of_keys is None else of_keys.laid(near, keys, far).flip(1),
        near,
        keys,
    )
    expected = by_pairs(query, key, of_queries, of_keys, near)
    engine, twin = distance_products(*given), distance_products_reference(*given)
    probe = numbers(*expected.shape, seed=11).detach()
    leaves = [query] * (which != "keys") + [key] * (which != "queries")
    leaves += [x for table in (of_queries, of_keys) if table is not None for x in (table if far else (table.near,))]
    ours, twins, theirs = (
        (x, *torch.autograd.grad((x * probe).sum(), leaves, allow_unused=True, materialize_grads=True))
        for x in (engine, twin, expected)
    )
    for one, other in zip((*ours, *twins), (*theirs, *theirs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_a_second_derivative_is_refused():
    query, key = numbers(1, 1, 2, WIDTH, seed=1), numbers(1, 1, 2, WIDTH, seed=2)
    table = numbers(1, 3, WIDTH, seed=3)
    (grad,) = torch.autograd.grad(
        distance_products(query, key, table, table, (0, 2), 2).sum(), query, retain_graph=True
    )
    assert grad.shape == query.shape
    with pytest.raises(RuntimeError, match="no second derivative.*eager"):
        torch.autograd.grad(distance_products(query, key, table, table, (0, 2), 2).sum(), query, create_graph=True)
