# SPDX-License-Identifier: Apache-2.0
"""Softmax attention of each query over a short list of keys of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.products import masked_softmax
from .common.row_lookup import places_in_rows, rows_of_tokens


class _Lists:
    """Rows of keys by lists of their places, index [B, H, T, n]: one place of all lists at a time, [B, T, H, d]."""

    def __init__(self, index: Tensor, keys: int) -> None:
        self.places = [places_in_rows(at, keys) for at in index.unbind(-1)]

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """x [B, H, S, d]"""
        rows = rows_of_tokens(x)
        for at in self.places:
            yield rows.index_select(0, at.flatten()).view(*at.shape, x.shape[-1])

    def sums(self, pieces: Iterable[Tensor], like: Tensor) -> Tensor:
        """Sums of the pieces [B, T, H, d] of each place at their keys, [B, H, S, d] as `like`."""
        batch, heads, keys, width = like.shape
        total = like.new_zeros(batch * keys * heads, width)
        for at, piece in zip(self.places, pieces):
            total.index_add_(0, at.flatten(), piece.reshape(-1, width))
        return total.view(batch, keys, heads, width).transpose(1, 2)


class _Products(torch.autograd.Function):
    """Products of queries [B, T, H, d] with the keys [B, H, S, d] of their lists, [B, T, H, n]. Gathered keys would
    take n times the memory of keys, so they are gathered again for the gradient, one place of the list at a time."""

    @staticmethod
    def forward(ctx, query, key, index):
        ctx.save_for_backward(query, key, index)
        return torch.stack([(query * rows).sum(-1) for rows in _Lists(index, key.shape[2]).of(key)], -1)

    @staticmethod
    def backward(ctx, gradient):
        query, key, index = ctx.saved_tensors
        lists, parts = _Lists(index, key.shape[2]), gradient[..., None].unbind(-2)
        to_query = torch.zeros_like(query)
        for part, rows in zip(parts, lists.of(key)):
            to_query.addcmul_(part, rows)
        return to_query, lists.sums((part * query for part in parts), key), None


class _Sums(torch.autograd.Function):
    """Sums [B, T, H, d] of values [B, H, S, d] of lists by weights [B, T, H, n]."""

    @staticmethod
    def forward(ctx, weights, value, index):
        ctx.save_for_backward(weights, value, index)
        output = value.new_zeros(*weights.shape[:3], value.shape[3])
        for part, rows in zip(weights[..., None].unbind(-2), _Lists(index, value.shape[2]).of(value)):
            output.addcmul_(part, rows)
        return output

    @staticmethod
    def backward(ctx, gradient):
        weights, value, index = ctx.saved_tensors
        lists = _Lists(index, value.shape[2])
        shares = torch.stack([(gradient * rows).sum(-1) for rows in lists.of(value)], -1)
        return shares, lists.sums((part * gradient for part in weights[..., None].unbind(-2)), value), None


def chosen_keys_attention(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, there: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """o_i = sum_e softmax_e(scale q_i k_j(i,e)) v_j(i,e) over the places e of i's list that are `there`.

    query [B, H, T, d], key and value [B, H, S, d], index [B, H, T, n] (each key once in a list), there [B, H, T, n]
    boolean -> [B, H, T, d]; zeros for an empty list, in the gradient as well. Scores and sums in float32 at least.
    Time O(T n d), memory O((T + S) d + T n).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _Products.apply((query.to(wide) * scale).transpose(1, 2), key.to(wide), index)
    weights = masked_softmax(scores, there.transpose(1, 2))
    weights = F.dropout(weights, dropout) if dropout else weights
    return _Sums.apply(weights, value.to(wide), index).transpose(1, 2).to(value.dtype)


def chosen_keys_reference(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, there: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """[`chosen_keys_attention`] with the lists as a mask over all pairs -> output, weights [B, H, T, S]."""
    mask = edges_mask(index, there, key.shape[2])
    weights = masked_softmax(query @ key.mT * scale, mask)
    return weights @ value, weights


def edges_mask(index: Tensor, there: Tensor, keys: int) -> Tensor:
    """Lists [..., T, n] -> boolean [..., T, keys], True = in the list."""
    found = torch.zeros(*index.shape[:-1], keys, dtype=torch.long, device=index.device)
    return found.scatter_add(-1, index, there.long()) > 0
