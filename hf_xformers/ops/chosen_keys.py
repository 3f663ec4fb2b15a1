"""Softmax attention of each query over a short list of keys of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, S, d] at index [B, H, T] -> [B, H, T, d]."""
    return x.gather(2, index[..., None].expand(*index.shape, x.shape[3]))


def _add_rows(total: Tensor, index: Tensor, x: Tensor) -> None:
    total.scatter_add_(2, index[..., None].expand(*index.shape, x.shape[3]), x)


class _Products(torch.autograd.Function):
    """Products of queries with the keys of their lists. Gathered keys would take n times the memory of keys, so they
    are gathered again for the gradient, one place of the list at a time."""

    @staticmethod
    def forward(ctx, query, key, index):
        ctx.save_for_backward(query, key, index)
        return torch.stack([(query * _rows(key, at)).sum(-1) for at in index.unbind(-1)], -1)

    @staticmethod
    def backward(ctx, gradient):
        query, key, index = ctx.saved_tensors
        to_query, to_key = torch.zeros_like(query), torch.zeros_like(key)
        for at, part in zip(index.unbind(-1), gradient.unbind(-1)):
            to_query.addcmul_(part[..., None], _rows(key, at))
            _add_rows(to_key, at, part[..., None] * query)
        return to_query, to_key, None


class _Sums(torch.autograd.Function):
    """Sums of values of lists by weights."""

    @staticmethod
    def forward(ctx, weights, value, index):
        ctx.save_for_backward(weights, value, index)
        output = value.new_zeros(*index.shape[:3], value.shape[3])
        for at, part in zip(index.unbind(-1), weights.unbind(-1)):
            output.addcmul_(part[..., None], _rows(value, at))
        return output

    @staticmethod
    def backward(ctx, gradient):
        weights, value, index = ctx.saved_tensors
        to_value = torch.zeros_like(value)
        shares = []
        for at, part in zip(index.unbind(-1), weights.unbind(-1)):
            shares.append((gradient * _rows(value, at)).sum(-1))
            _add_rows(to_value, at, part[..., None] * gradient)
        return torch.stack(shares, -1), to_value, None


def chosen_keys_attention(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, there: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """o_i = sum_e softmax_e(scale q_i k_j(i,e)) v_j(i,e) over the places e of i's list that are `there`.

    query [B, H, T, d], key and value [B, H, S, d], index [B, H, T, n] (each key once in a list), there [B, H, T, n]
    boolean -> [B, H, T, d]; zeros for an empty list, in the gradient as well. Scores in float32 at least. Time
    O(T n d), memory O((T + S) d + T n).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _Products.apply(query.to(wide) * scale, key.to(wide), index)
    weights = torch.softmax(scores.masked_fill(~there, torch.finfo(wide).min), -1).masked_fill(~there, 0.0)
    weights = F.dropout(weights, dropout) if dropout else weights
    return _Sums.apply(weights.to(value.dtype), value, index)


def chosen_keys_reference(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, there: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """[`chosen_keys_attention`] with the lists as a mask over all pairs -> output, weights [B, H, T, S]."""
    mask = edges_mask(index, there, key.shape[2])
    scores = (query @ key.mT * scale).masked_fill(~mask, torch.finfo(query.dtype).min)
    weights = torch.softmax(scores, -1).masked_fill(~mask, 0.0)
    return weights @ value, weights


def edges_mask(index: Tensor, there: Tensor, keys: int) -> Tensor:
    """Lists [..., T, n] -> boolean [..., T, keys], True = in the list."""
    found = torch.zeros(*index.shape[:-1], keys, dtype=torch.long, device=index.device)
    return found.scatter_add(-1, index, there.long()) > 0


__all__ = ["chosen_keys_attention", "chosen_keys_reference", "edges_mask"]
