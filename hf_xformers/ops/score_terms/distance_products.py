# SPDX-License-Identifier: Apache-2.0
"""Scores that are products of a query, or of a key, with one vector for each distance.

No vector is looked up for a pair. A tile of queries is multiplied with the vectors of all its distances at once; read
along the diagonals of the result, each query has its own. For keys the diagonals run the other way. Narrow tiles keep
the products that belong to no pair few: t queries and s keys have t + s - 1 distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.shifted_rows import shifted_view

# Positions in a tile, a power of two. About an eighth of those on the other side: an eighth more is multiplied than is
# read.
LEAST_TILE, MOST_TILE, SHARE = 64, 256, 8


def distance_products(
    query: Tensor,
    key: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    near: tuple[int, int],
    keys: int,
) -> Tensor:
    """q_i a_(j-i) + k_j b_(j-i), each where its vectors are given.

    query [B, h, t, d], key [B, h, s, d] (`None` without vectors for keys), near: the n keys `[first, stop)` that
    have a vector for each distance, keys: s -> [B, h, t, s]. of_queries `[h or 1, t + n - 1, d]`: vectors by
    distance, from the last query and the first near key on; of_keys: the same from the last near key and the first
    query on. A vector more at the end where keys lie beyond the near ones is that of all keys there; without it,
    their products are zeros. The result cannot be differentiated twice.

    Raises:
        RuntimeError: a derivative of the derivative is asked for.
    """
    return _DistanceProducts.apply(near, keys, query, key, of_queries, of_keys)


def _matmul(x: Tensor, table: Tensor) -> Tensor:
    """x [B, h, t, n], table [h or 1, n, d] -> [B, h, t, d]"""
    return torch.matmul(x, table.to(x.dtype))


class _DistanceProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        near: tuple[int, int],
        keys: int,
        query: Tensor,
        key: Tensor | None,
        of_queries: Tensor | None,
        of_keys: Tensor | None,
    ) -> Tensor:
        (first, stop), length = near, query.shape[2]
        result = query.new_empty(*query.shape[:3], keys)
        before, middle, after = _sides(result, near)
        if of_queries is None:
            result.zero_()
        else:
            early, vectors, late = _vectors(of_queries, near, length, keys)
            _lay_products(middle, query, vectors, add=False)
            for side, vector in ((before, early), (after, late)):
                side.zero_() if vector is None else side.copy_(_matmul(query, vector.mT))
        if key is not None and of_keys is not None:
            late, vectors, early = _vectors(of_keys, (keys - stop, keys - first), length, keys)
            _lay_products(middle.mT, key[:, :, first:stop], vectors, add=True)
            for side, part, vector in ((before, key[:, :, :first], early), (after, key[:, :, stop:], late)):
                if vector is not None:
                    side += _matmul(part, vector.mT).mT
        ctx.near = near
        ctx.save_for_backward(query, key, of_queries, of_keys)
        return result

    @staticmethod
    @first_derivative_only("Attention by distance", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        (first, stop), (query, key, of_queries, of_keys) = ctx.near, ctx.saved_tensors
        length, keys = grad.shape[-2:]
        grad = grad.to(query.dtype)  # autocast may have made the products of another type
        grad_query = grad_key = to_queries = to_keys = None
        before, within, after = _sides(grad, ctx.near)
        if of_queries is not None:
            grad_query, to_queries = torch.empty_like(query), torch.zeros_like(of_queries, dtype=grad.dtype)
            early, vectors, late = _vectors(of_queries, ctx.near, length, keys)
            to_early, found, to_late = _vectors(to_queries, ctx.near, length, keys)
            _gradients_of_products(within, query, vectors, grad_query, found)
            for piece, vector, target in ((before, early, to_early), (after, late, to_late)):
                if vector is not None and target is not None:
                    sums = piece.sum(-1, keepdim=True)
                    grad_query += _matmul(sums, vector)
                    target += torch.matmul(sums.mT, query).sum_to_size(target.shape)
            to_queries = to_queries.to(of_queries.dtype)
        if key is not None and of_keys is not None:
            grad_key, to_keys = torch.zeros_like(key), torch.zeros_like(of_keys, dtype=grad.dtype)
            turned = (keys - stop, keys - first)
            late, vectors, early = _vectors(of_keys, turned, length, keys)
            to_late, found, to_early = _vectors(to_keys, turned, length, keys)
            _gradients_of_products(within.mT, key[:, :, first:stop], vectors, grad_key[:, :, first:stop], found)
            sides = ((before, slice(0, first), early, to_early), (after, slice(stop, keys), late, to_late))
            for piece, some, vector, target in sides:
                if vector is not None and target is not None:
                    sums = piece.sum(-2).unsqueeze(-1)
                    grad_key[:, :, some] = _matmul(sums, vector)
                    target += torch.matmul(sums.mT, key[:, :, some]).sum_to_size(target.shape)
            to_keys = to_keys.to(of_keys.dtype)
        return None, None, grad_query, grad_key, to_queries, to_keys


def _sides(x: Tensor, near: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """[B, h, t, s] -> what belongs to keys before the near ones, to them, and to those after them."""
    return x[..., : near[0]], x[..., near[0] : near[1]], x[..., near[1] :]


def _vectors(x: Tensor, near: tuple[int, int], length: int, keys: int) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """[h or 1, n, d] -> the vector of all keys before the near ones, those by distance, the vector of all keys after
    them."""
    (first, stop), count = near, length + near[1] - near[0] - 1
    if x.shape[1] == count:
        return None, x, None
    begin = int(first > 0)
    return x[:, :1] if begin else None, x[:, begin : begin + count], x[:, begin + count :] if stop < keys else None


def _lay_products(result: Tensor, x: Tensor, vectors: Tensor, add: bool) -> None:
    """Writes, or adds, x_i v_(j - i) to result [B, h, n, m] for x [B, h, n, d] and vectors [h or 1, n + m - 1, d],
    from those of the last i and the first j on."""
    for tile, rows in _tiles(*result.shape[-2:]):
        products = shifted_view(_matmul(x[:, :, tile], vectors[:, rows].mT), result.shape[-1])
        target = result[:, :, tile]
        target.add_(products) if add else target.copy_(products)


def _gradients_of_products(grad: Tensor, x: Tensor, vectors: Tensor, grad_x: Tensor, grad_vectors: Tensor) -> None:
    """The gradients for [`_lay_products`], grad [B, h, n, m]: writes that of x, and adds that of the vectors."""
    laid = grad.new_zeros(0)
    for tile, rows in _tiles(*grad.shape[-2:]):
        part, target = x[:, :, tile], grad_vectors[:, rows]
        if laid.shape[-2:] != (part.shape[2], target.shape[1]):  # what lies off the diagonals stays zero
            laid = grad.new_zeros(*part.shape[:3], target.shape[1])
        shifted_view(laid, grad.shape[-1]).copy_(grad[:, :, tile])
        grad_x[:, :, tile] = _matmul(laid, vectors[:, rows])
        if part.shape[:2] == (1, target.shape[0]):
            target.baddbmm_(laid[0].mT, part[0])
        else:
            target += torch.matmul(laid.mT, part).sum_to_size(target.shape)


def _tiles(length: int, others: int):
    """Tiles of `length` positions, and the rows of their distances to `others` positions."""
    size = min(max(1 << (max(others // SHARE, 1) - 1).bit_length(), LEAST_TILE), MOST_TILE)
    for begin in range(0, length, size):
        end = min(begin + size, length)
        yield slice(begin, end), slice(length - end, length - begin + others - 1)
