"""Scores that are products of a query, or of a key, with one vector for each distance.

No vector is looked up for a pair. A block of queries is multiplied with the vectors of all its distances at once; read along
the diagonals of the result, each query has its own. For keys the diagonals run the other way, and a block of keys as narrow
as a tile keeps the products that belong to no pair few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derivatives import LITERAL, first_derivative_only
from .shifted_rows import shifted_view

# Keys in a tile: with t queries they have t + 63 distances, so that for 256 queries a quarter more is multiplied than is read.
TILE_KEYS = 64


class ByDistance(NamedTuple):
    """Vectors by distance.

    near: `[h or 1, t + n - 1, d]`, for t queries and the n keys near them, from the last query and the first of these keys
    on. far: `[h or 1, 2, d]`, one vector for all earlier keys and one for all later ones.
    """

    near: Tensor
    far: Tensor


def distance_products(
    query: Tensor,
    key: Tensor | None,
    of_queries: ByDistance | None,
    of_keys: ByDistance | None,
    near: tuple[int, int],
    keys: int,
) -> Tensor:
    """q_i a_(j-i) + k_j b_(j-i), each where its vectors are given.

    query [B, h, t, d], key [B, h, s, d] (`None` without vectors for keys), near: the keys `[first, stop)` that `near` vectors
    belong to, keys: s -> [B, h, t, s], which may be strided. The result cannot be differentiated twice.

    Raises:
        RuntimeError: a derivative of the derivative is asked for.
    """
    return _DistanceProducts.apply(near, keys, query, key, *(of_queries or (None, None)), *(of_keys or (None, None)))


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
        near_a: Tensor | None,
        far_a: Tensor | None,
        near_b: Tensor | None,
        far_b: Tensor | None,
    ) -> Tensor:
        (first, stop), length = near, query.shape[2]
        result = early = late = None
        if near_a is not None and far_a is not None:
            middle = shifted_view(_matmul(query, near_a.mT), stop - first)
            if stop - first == keys:
                result = middle
            else:
                result = query.new_empty(*query.shape[:3], keys)
                result[..., first:stop] = middle
                early, late = _matmul(query, far_a.mT).split(1, dim=-1)
        if result is None:
            result = query.new_zeros(*query.shape[:3], keys)
        if key is not None and near_b is not None and far_b is not None:
            backwards = near_b.flip(1)  # from the largest distance on, a key meets the queries in their order
            for tile, rows in _tiles(near, length):
                products = _matmul(key[:, :, tile], backwards[:, rows].mT)
                result[..., tile] += shifted_view(products, length).mT
            left, right = far_b.to(key.dtype).unsqueeze(-1).unbind(1)
            to_early, to_late = (_matmul(x, v).mT for x, v in ((key[:, :, :first], left), (key[:, :, stop:], right)))
            early = to_early if early is None else early + to_early
            late = to_late if late is None else late + to_late
        if early is not None and late is not None:
            result[..., :first], result[..., stop:] = early, late
        ctx.near = near
        ctx.save_for_backward(query, key, near_a, far_a, near_b, far_b)
        return result

    @staticmethod
    @first_derivative_only("Attention by distance", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        (first, stop), (query, key, near_a, far_a, near_b, far_b) = ctx.near, ctx.saved_tensors
        length, grad = query.shape[2], grad.to(query.dtype)  # autocast may have made the products of another type
        grad_query = grad_key = to_near_a = to_far_a = to_near_b = to_far_b = None
        before, within, after = grad.split([first, stop - first, grad.shape[-1] - stop], dim=-1)
        any_far = stop - first < grad.shape[-1]
        if near_a is not None and far_a is not None:
            laid = grad.new_zeros(*grad.shape[:3], near_a.shape[1])
            shifted_view(laid, stop - first).copy_(within)
            grad_query = _matmul(laid, near_a)
            to_near_a = torch.matmul(laid.mT, query).sum_to_size(near_a.shape).to(near_a.dtype)
            if any_far:
                outer = torch.stack((before.sum(-1), after.sum(-1)), dim=-1)
                grad_query += _matmul(outer, far_a)
                to_far_a = torch.matmul(outer.mT, query).sum_to_size(far_a.shape).to(far_a.dtype)
        if key is not None and near_b is not None and far_b is not None:
            grad_key = torch.empty_like(key)
            backwards, to_backwards = near_b.flip(1), torch.zeros_like(near_b, dtype=grad.dtype)
            laid = grad.new_zeros(0)
            for tile, rows in _tiles(ctx.near, length):
                part, count = key[:, :, tile], tile.stop - tile.start
                if laid.shape[-2:] != (count, length + count - 1):  # what lies off the diagonals stays zero
                    laid = grad.new_zeros(*part.shape[:3], length + count - 1)
                shifted_view(laid, length).copy_(grad[..., tile].mT)
                grad_key[:, :, tile] = _matmul(laid, backwards[:, rows])
                target = to_backwards[:, rows]
                if part.shape[:2] == (1, target.shape[0]):
                    target.baddbmm_(laid[0].mT, part[0])
                else:
                    target += torch.matmul(laid.mT, part).sum_to_size(target.shape)
            to_near_b = to_backwards.flip(1).to(near_b.dtype)
            sides = ((slice(0, first), before), (slice(stop, None), after))
            to_far_b = torch.empty_like(far_b) if any_far else None
            for number, (keys, piece) in enumerate(sides if to_far_b is not None else ()):
                outer = piece.sum(2).unsqueeze(-1)
                grad_key[:, :, keys] = _matmul(outer, far_b[:, number : number + 1])
                to_far_b[:, number : number + 1] = (
                    (outer * key[:, :, keys]).sum(2, keepdim=True).sum_to_size(far_b[:, :1].shape)
                )
        return None, None, grad_query, grad_key, to_near_a, to_far_a, to_near_b, to_far_b


def _tiles(near: tuple[int, int], length: int):
    """Tiles of near keys, and the rows of their distances from `length` queries, from the largest distance on."""
    first, stop = near
    for begin in range(first, stop, TILE_KEYS):
        end = min(begin + TILE_KEYS, stop)
        yield slice(begin, end), slice(stop - end, stop - begin + length - 1)


__all__ = ["ByDistance", "distance_products"]
