# SPDX-License-Identifier: Apache-2.0
"""Softmax attention whose scores gain a number for each distance and further products of the pair.

Such scores are never laid out. Read along diagonals, a row of numbers by distance is a matrix whose rows start one
further to the right each, which a stride of one says without a copy; and further products are further columns of
queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.derivatives import LITERAL, first_derivative_only
from ..common.exponential import exp_
from .blocks import (
    LEAST_COLUMNS,
    TILE_SCORES,
    finite_norm,
    fused_attention,
    plus_products,
)
from .terms import Blocks, ScoreTerms

# Queries in a block at least, however many samples there are: fewer would add to the gradients of all keys too often.
LEAST_ROWS = 128


def diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    further: tuple[Tensor, Tensor] | None,
    line: Tensor | None,
    pairs: ScoreTerms,
    blocks: Blocks,
) -> Tensor:
    """softmax_j(q_i k_j + a_i c_j + b_(j-i)) v_j over all j that are not hidden from i.

    query [B, H, T, d] (scaled), key and value [B, H, S, d]; further: a [B or 1, H, T, n] and c [B or 1, H, S, n];
    line: b [H, T + S - 1], from the distance of the last query and the first key on -> [B, H, T, d]. A query that sees
    nothing gets zeros. Memory: a few tiles of scores, and one block where `further` or a padding mask is given. The
    result cannot be differentiated twice.

    Raises:
        RuntimeError: a derivative of the derivative is asked for.
    """
    # Made as projections read it: heads of a token side by side.
    return _DiagonalAttention.apply(pairs, blocks, query, key, value, *(further or (None, None)), line).transpose(1, 2)


def blocks_of_tiles(batch: int, heads: int, length: int) -> Blocks:
    """Blocks as high as a tile, for scores that are never laid out: neither further products nor hidden pairs."""
    rows = max(TILE_SCORES // (batch * LEAST_COLUMNS), LEAST_ROWS)
    return Blocks(min(max(rows // max(length, 1), 1), heads), rows)


def _diagonals(line: Tensor, length: int, rows: slice, keys: slice) -> Tensor:
    """b of the queries `rows`, last query first, and of `keys`: a view [h, t, s] of line [h, T + S - 1]."""
    start = line.storage_offset() + length - rows.stop + keys.start
    return line.as_strided(
        (line.shape[0], rows.stop - rows.start, keys.stop - keys.start), (line.stride(0), 1, 1), start
    )


def _ordered(line: Tensor | None, query: Tensor, num_keys: int, causal: bool) -> Tensor | None:
    """The line with -inf where a key is later than the query, if the order counts."""
    if causal:
        if line is None:
            line = query.new_zeros(query.shape[1], query.shape[2] + num_keys - 1)
        line = line.clone()
        line[:, num_keys:] = -torch.inf
    return line if line is None or line.stride(1) == 1 else line.contiguous()


class _DiagonalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pairs: ScoreTerms,
        blocks: Blocks,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        of_queries: Tensor | None,
        of_keys: Tensor | None,
        line: Tensor | None,
    ) -> Tensor:
        batch, heads, length, width = query.shape
        output = query.new_empty(batch, length, heads, width)
        norms = query.new_empty(batch, heads, length)
        ordered = _ordered(line, query, key.shape[2], pairs.ordered)
        for first in range(0, heads, blocks.heads):
            group = slice(first, first + blocks.heads)
            some = None if ordered is None else ordered[group]
            for begin in range(0, length, blocks.rows):
                rows = slice(begin, min(begin + blocks.rows, length))
                keys = slice(0, pairs.last_key(rows.stop))
                scores = None if some is None else _diagonals(some, length, rows, keys)[None]
                if of_queries is not None and of_keys is not None:
                    own = of_queries[:, group, rows].flip(2)
                    scores = plus_products(scores, own, of_keys[:, group, keys])
                hidden = pairs.hidden(rows, keys)
                if hidden is not None:
                    if scores is None:
                        scores = query.new_zeros(1, 1, 1, 1)
                    scores = scores.masked_fill(hidden.flip(2), -torch.inf)
                    scores = scores.expand(-1, -1, rows.stop - rows.start, -1)
                near = (key[:, group, keys], value[:, group, keys])
                result, norm = fused_attention(query[:, group, rows].flip(2), *near, scores)
                output[:, rows, group] = result.flip(2).transpose(1, 2)
                norms[:, group, rows] = norm.flip(2)
        ctx.pairs, ctx.blocks = pairs, blocks
        ctx.save_for_backward(query, key, value, of_queries, of_keys, line, output, norms)
        return output

    @staticmethod
    @first_derivative_only("Attention with score terms", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        query, key, value, of_queries, of_keys, line, output, norms = ctx.saved_tensors
        heads = query.shape[1]
        along = (grad * output).sum(-1).transpose(1, 2)
        grad = grad.transpose(1, 2)
        sources = (query, key, value, of_queries, of_keys, line)
        found = tuple(None if x is None else torch.zeros_like(x) for x in sources)
        ordered = _ordered(line, query, key.shape[2], ctx.pairs.ordered)
        for first in range(0, heads, ctx.blocks.heads):
            group = slice(first, first + ctx.blocks.heads)
            q, k, v, upstream, norm, sums = (x[:, group] for x in (query, key, value, grad, norms, along))
            _Group(
                ctx.pairs,
                ctx.blocks.rows,
                *(q, k, v, upstream, norm, sums),
                None if of_queries is None else of_queries[:, group],
                None if of_keys is None else of_keys[:, group],
                None if ordered is None else ordered[group],
                tuple(None if x is None else x[:, group] for x in found[:5]),
                None if found[5] is None else found[5][group],
            ).backward()
        return None, None, *found


@dataclass
class _Group:
    """Some heads in the backward pass; tensors [B, h, ...], line [h, T + S - 1]; found: the gradients to add to, of
    queries, keys, values and the further factors."""

    pairs: ScoreTerms
    block_rows: int
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    norms: Tensor
    along: Tensor
    of_queries: Tensor | None
    of_keys: Tensor | None
    line: Tensor | None
    found: tuple[Tensor | None, ...]
    found_line: Tensor | None

    def backward(self) -> None:
        batch, heads, length, _ = self.query.shape
        wide_query, wide_key = self._wide(self.query, self.of_queries), self._wide(self.key, self.of_keys)
        value = self.value.flatten(0, 1)
        grad_key, grad_value = torch.zeros_like(wide_key), torch.zeros_like(value)
        grad_query = torch.empty_like(wide_query)
        most = max(TILE_SCORES // (batch * heads * min(self.block_rows, length)), LEAST_COLUMNS)
        buffers: dict[tuple[int, int], Tensor] = {}
        for begin in range(0, length, self.block_rows):
            rows = slice(begin, min(begin + self.block_rows, length))
            count = rows.stop - rows.start
            query = wide_query[:, rows].flip(1)
            grad = self.grad[:, :, rows].flip(2).flatten(0, 1)
            norm = finite_norm(self.norms[:, :, rows].flip(2)).flatten(0, 1)[..., None]
            along = self.along[:, :, rows].flip(2).flatten(0, 1)[..., None]
            own, seen = torch.zeros_like(query), self.pairs.last_key(rows.stop)
            for left in range(0, seen, most):
                tile = slice(left, min(left + most, seen))
                columns = tile.stop - tile.start
                near = wide_key[:, tile]
                weights = exp_(self._scores(query, near, rows, tile).sub_(norm))
                change = torch.bmm(grad, value[:, tile].mT).sub_(along)
                if self.found_line is None:
                    change.mul_(weights)
                else:
                    if (count, columns) not in buffers:
                        buffers[count, columns] = change.new_zeros(batch * heads, count, count + columns)
                    buffer = buffers[count, columns]  # what lies off the diagonals stays zero
                    steps = (count * (count + columns), count + columns + 1, 1)
                    change = torch.mul(change, weights, out=buffer.as_strided(change.shape, steps))
                    first = length - rows.stop + left
                    sums = buffer.sum(1).unflatten(0, (batch, heads)).sum(0)
                    self.found_line[:, first : first + count + columns - 1] += sums[:, :-1]
                grad_value[:, tile].baddbmm_(weights.mT, grad)
                grad_key[:, tile].baddbmm_(change.mT, query)
                own.baddbmm_(change, near)
            grad_query[:, rows] = own.flip(1)
        (query_part, query_rest), (key_part, key_rest) = self._split(grad_query), self._split(grad_key)
        parts = (query_part, key_part, grad_value.unflatten(0, (batch, heads)), query_rest, key_rest)
        for target, part in zip(self.found, parts):
            if target is not None:
                target += part if part.shape[0] == target.shape[0] else part.sum(0, keepdim=True)

    def _wide(self, x: Tensor, further: Tensor | None) -> Tensor:
        """[B, h, T or S, d] and [B or 1, h, T or S, n] -> [B h, T or S, d + n]"""
        if further is not None:
            x = torch.cat((x, further.expand(x.shape[0], -1, -1, -1)), dim=-1)
        return x.flatten(0, 1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The reverse of [`_Group._wide`] for gradients; the further part may be empty."""
        width = self.query.shape[-1]
        x = x.unflatten(0, self.query.shape[:2])
        return x[..., :width], x[..., width:]

    def _scores(self, query: Tensor, key: Tensor, rows: slice, keys: slice) -> Tensor:
        """[B h, t, s] with -inf where a pair is hidden."""
        if self.line is None:
            scores = torch.bmm(query, key.mT)
        else:
            base = _diagonals(self.line, self.query.shape[2], rows, keys)
            batch = self.query.shape[0]
            base = base if batch == 1 else base[None].expand(batch, -1, -1, -1).flatten(0, 1)
            scores = torch.baddbmm(base, query, key.mT)
        hidden = self.pairs.hidden(rows, keys)
        if hidden is not None:
            scores.unflatten(0, self.query.shape[:2]).masked_fill_(hidden.flip(2), -torch.inf)
        return scores
