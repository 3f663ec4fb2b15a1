# SPDX-License-Identifier: Apache-2.0
"""Attention with alpha-entmax in the softmax's place, some rows of scores of one head at a time.

What is kept for the backward pass besides the inputs is each row's largest score and its threshold, from which one
evaluation makes the weights again: the search for the threshold is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common.derivatives import LITERAL, first_derivative_only
from .entmax import distances, normalized, threshold

# Scores of one head that are multiplied together, and those whose threshold is sought together: half a megabyte in
# float32, as a second-level cache holds next to a copy.
TILE_SCORES, SEARCH_SCORES = 1 << 18, 1 << 16
LEAST_ROWS = 16
# Scores of one head from which on going through heads one by one costs less than laying the scores of all out.
WORTH_A_TILE = 1 << 13

Visible = Callable[[slice, slice], Tensor | None]


def worth_tiles(queries: int, keys: int) -> bool:
    """Whether heads have enough scores each: not in short texts, nor where a few queries read a long one."""
    return queries >= LEAST_ROWS and queries * keys >= WORTH_A_TILE


def entmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | float,
    visible: Visible,
    last_key: Callable[[int], int],
) -> Tensor:
    """alpha-entmax_j(q_i k_j) v_j over the j that i may see, on a processor.

    query [B, H, T, d] (scaled), key and value [B, H, S, d]; alpha: a number in (1, 2], or a tensor of them [H or 1]
    that gets a gradient. visible(queries, keys): who may see whom, [B or 1, H or 1, t or 1, s], None = everybody;
    last_key(n): how many keys the first n queries see at most -> [B, T, H, d]. A query that sees nothing gets zeros.
    Memory: a few tiles of scores. The result cannot be differentiated twice.
    """
    if not isinstance(alpha, Tensor):
        alpha = query.new_tensor([alpha], dtype=torch.float64)
    return _EntmaxAttention.apply(visible, last_key, query, key, value, alpha)


class _Tiles:
    """Scores of the queries `rows` of one head, relative to their largest and times alpha - 1, tile by tile."""

    def __init__(self, visible: Visible, last_key: Callable[[int], int], query: Tensor, key: Tensor) -> None:
        self.visible, self.last_key, self.query, self.key = visible, last_key, query, key
        self.rows = max(TILE_SCORES // max(key.shape[2], 1), LEAST_ROWS)

    def __iter__(self):
        """(row, head, queries, keys, what hides pairs: [t, s], -inf or 0; None: nothing)."""
        batch, heads, length, _ = self.query.shape
        for begin in range(0, length, self.rows):
            rows = slice(begin, min(begin + self.rows, length))
            keys = slice(0, self.last_key(rows.stop))
            seen = self.visible(rows, keys)
            if seen is not None:
                hidden = self.query.new_zeros(()).masked_fill(~seen, -math.inf)
                hidden = hidden.expand(batch, heads, -1, -1)
            for row in range(batch):
                for head in range(heads):
                    yield row, head, rows, keys, None if seen is None else hidden[row, head]


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    scores = torch.mm(query, key.T)
    return scores if hidden is None else scores.add_(hidden)


class _EntmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        visible: Visible,
        last_key: Callable[[int], int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        output = value.new_empty(batch, length, heads, value.shape[3])  # heads of a token side by side
        tops, taus = query.new_empty(2, batch, heads, length, 1)
        less = (alpha.double() - 1).expand(heads).tolist()
        for row, head, rows, keys, hidden in _Tiles(visible, last_key, query, key):
            scores = _scores(query[row, head, rows], key[row, head, keys], hidden)
            top = scores.amax(-1, keepdim=True)
            empty = torch.isneginf(top)
            top.masked_fill_(empty, 0.0)
            scores.sub_(top).mul_(less[head])
            tau = tops.new_empty(top.shape)
            some = max(SEARCH_SCORES // max(scores.shape[1], 1), 1)
            for part, found, none in zip(scores.split(some), tau.split(some), empty.split(some)):
                found.copy_(threshold(part, less[head]).masked_fill_(none, 1.0))  # 1: nothing reaches it
                part.copy_(normalized(*distances(part, found, less[head])))
            output[row, rows, head] = torch.mm(scores, value[row, head, keys])
            tops[row, head, rows], taus[row, head, rows] = top, tau
        ctx.visible, ctx.last_key, ctx.less = visible, last_key, less
        ctx.save_for_backward(query, key, value, alpha, tops, taus)
        return output

    @staticmethod
    @first_derivative_only("alpha-entmax", LITERAL)
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, alpha, tops, taus = ctx.saved_tensors
        to_query, to_key, to_value = (torch.zeros_like(x) for x in (query, key, value))
        to_alpha = [0.0] * query.shape[1]
        for row, head, rows, keys, hidden in _Tiles(ctx.visible, ctx.last_key, query, key):
            less = ctx.less[head]
            own, near, upstream = query[row, head, rows], key[row, head, keys], grad[row, rows, head]
            scores = _scores(own, near, hidden).sub_(tops[row, head, rows]).mul_(less)
            change = torch.mm(upstream, value[row, head, keys].T)
            some, along = max(SEARCH_SCORES // max(scores.shape[1], 1), 1), taus[row, head, rows]
            for part, tau, moved in zip(scores.split(some), along.split(some), change.split(some)):
                to_alpha[head] += _pull_back(part, tau, moved, less, ctx.needs_input_grad[5])
            to_value[row, head, keys].addmm_(scores.T, upstream)
            to_key[row, head, keys].addmm_(change.T, own)
            to_query[row, head, rows] = torch.mm(change, near)
        found = alpha.new_tensor(to_alpha).sum_to_size(alpha.shape) if ctx.needs_input_grad[5] else None
        return None, None, to_query, to_key, to_value, found


def _pull_back(z: Tensor, tau: Tensor, grad: Tensor, less: float, wants_alpha: bool) -> float:
    """Puts the weights in the place of z, and in that of `grad`, the gradient of the weights, that of the scores.
    Returns that of alpha."""
    distance, slopes = distances(z, tau, less)
    tiny = torch.finfo(z.dtype).tiny
    torch.mul(slopes, distance, out=z)
    total = z.sum(-1, keepdim=True).clamp_(min=tiny)
    z.div_(total)
    slopes.div_(total ** (1 - less))  # p^(2 - alpha)
    mean = (slopes * grad).sum(-1, keepdim=True) / slopes.sum(-1, keepdim=True).clamp_(min=tiny)
    grad.sub_(mean)
    to_alpha = 0.0
    if wants_alpha:
        # Correia et al. 2019, proposition 1. What moves along with alpha sums to zero in each row, as does
        # slopes * (grad - mean), so that of its four terms two are left.
        weighed = z * grad
        logs = distance.clamp_(min=tiny).log_().div_(less).sub_(total.log())
        to_alpha = float(weighed.sum(dtype=torch.float64)) / less**2
        to_alpha -= float(weighed.mul_(logs).sum(dtype=torch.float64)) / less
    grad.mul_(slopes)
    return to_alpha
