# SPDX-License-Identifier: Apache-2.0
"""Softmax attention whose scores have terms of their own, which a function makes block by block.

No fused kernel knows the derivative of such terms. Here a block of queries has its terms made, handed to the
processor's fused kernel as an additive mask, and dropped. The backward pass makes them once more, and walks the block
in tiles that stay in the processor's cache: products that go through memory run at half their speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat import fused_attention_with_norm
from ..common.derivatives import LITERAL, first_derivative_only
from ..common.exponential import exp_
from ..common.shifted_rows import SharedRows
from .terms import Blocks, QueryBlock, ScoreTerms

# Scores (over batch and heads) in a tile: half a megabyte in float32, as a second-level cache holds next to what makes
# them.
TILE_SCORES = 1 << 17
LEAST_COLUMNS = 256

_fused_forward = fused_attention_with_norm()


def plus_products(scores: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """scores [B or 1, H, t, s] (None: zeros) + query [B or 1, H, t, d] key [B or 1, H, s, d]^T, without the products
    as a tensor of their own."""
    if scores is None:
        return torch.matmul(query, key.mT)
    batch = max(query.shape[0], key.shape[0])
    shape = (batch, *query.shape[1:3], key.shape[2])
    flat = scores.to(query.dtype).expand(shape).reshape(-1, *shape[2:])
    query, key = (x.expand(batch, -1, -1, -1).flatten(0, 1) for x in (query, key))
    return torch.baddbmm(flat, query, key.mT).view(shape)


def applies(query: Tensor, dropout: float) -> bool:
    """Whether [`term_attention`] is the way to go: on a processor, in full precision, outside of compiled graphs."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and not dropout
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")  # which would make products of another type than their targets
    )


def term_attention(
    query: Tensor, key: Tensor, value: Tensor, tables: tuple[Tensor, ...], terms: ScoreTerms, blocks: Blocks
) -> Tensor:
    """softmax_j(q_i k_j + term_ij) v_j [+ term of the values] over all j that are not hidden from i.

    query [B, H, T, d] (scaled), key and value [B, H, S, d], tables [H or 1, ...] -> [B, H, T, d]. A query that sees
    nothing gets zeros. Memory: a few blocks of scores. The result cannot be differentiated twice.

    Raises:
        RuntimeError: a derivative of the derivative is asked for.
    """
    # Made as projections read it: heads of a token side by side.
    return _TermAttention.apply(terms, blocks, query, key, value, *tables).transpose(1, 2)


def _some(tables: tuple[Tensor, ...], heads: slice) -> tuple[Tensor, ...]:
    return tuple(x if x.shape[0] == 1 else x[heads] for x in tables)


def _rows_of(tensors: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
    return tuple(x[:, :, rows] for x in tensors)


class _TermAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, terms: ScoreTerms, blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, *tables: Tensor
    ):
        batch, heads, length, width = query.shape
        output = query.new_empty(batch, length, heads, width)
        norms = query.new_empty(batch, heads, length)
        for first in range(0, heads, blocks.heads):
            group = slice(first, first + blocks.heads)
            q, k, v, some = query[:, group], key[:, group], value[:, group], _some(tables, group)
            of_queries = terms.by_query(q, some)
            of_keys = tuple(SharedRows(x, 1) for x in terms.by_key(k, some))
            of_distances = tuple(SharedRows(x, 1) for x in terms.by_distance(some))
            for begin in range(0, length, blocks.rows):
                rows = slice(begin, min(begin + blocks.rows, length))
                seen = terms.last_key(rows.stop)
                part = q[:, :, rows]
                own = _rows_of(of_queries, rows)
                scores = terms.scores(QueryBlock(part, own, of_keys, rows, seen, of_distances), some)
                scores = terms.hide(scores, rows)
                result, norm = _attend(part, k[:, :, :seen], v[:, :, :seen], scores, terms, some, rows)
                output[:, rows, group] = result.transpose(1, 2)
                norms[:, group, rows] = norm
        ctx.terms, ctx.blocks = terms, blocks
        ctx.save_for_backward(query, key, value, output, norms, *tables)
        return output

    @staticmethod
    @first_derivative_only("Attention with score terms", LITERAL)
    def backward(ctx: Any, grad: Tensor):
        terms, blocks = ctx.terms, ctx.blocks
        query, key, value, output, norms, *tables = ctx.saved_tensors
        heads = query.shape[1]
        along = (grad * output).sum(-1).transpose(1, 2)  # [B, H, T]
        grad = grad.transpose(1, 2)
        found = [torch.zeros_like(x) for x in (query, key, value, *tables)]
        for first in range(0, heads, blocks.heads):
            group = slice(first, first + blocks.heads)
            q, k, v, upstream, norm, sums = (x[:, group] for x in (query, key, value, grad, norms, along))
            _group_backward(
                terms,
                blocks.rows,
                *(q, k, v, upstream, norm, sums),
                _some(tuple(tables), group),
                [x[:, group] for x in found[:3]],
                [x if x.shape[0] == 1 else x[group] for x in found[3:]],
            )
        return None, None, *found


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    terms: ScoreTerms,
    tables: tuple[Tensor, ...],
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Output [B, h, t, d] and logarithm of the sum of exponentials [B, h, t] (-inf: a query that sees nothing)."""
    if not terms.has_values:
        return fused_attention(query, key, value, scores)
    weights, norm = _weights(query, key, scores)
    output = torch.matmul(weights, value) + terms.values(weights, tables, rows)
    return output.masked_fill(torch.isneginf(norm)[..., None], 0.0), norm


def _weights(query: Tensor, key: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    scores = plus_products(scores, query, key)
    norm = scores.logsumexp(-1)
    return exp_(scores.sub_(finite_norm(norm)[..., None])), norm


def fused_attention(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax_j(q_i k_j + scores_ij) v_j [B, h, t, d] and the logarithm of the sum of exponentials [B, h, t]. scores
    [B or 1, h, t, s], -inf: hidden. A query that sees nothing gets zeros and -inf."""
    if _fused_forward is not None:
        output, norm = _fused_forward(query, key, value, 0.0, False, attn_mask=scores, scale=1.0)
        norm = norm.to(query.dtype)
    else:
        weights, norm = _weights(query, key, query.new_zeros(1, 1, 1, 1) if scores is None else scores)
        output = torch.matmul(weights, value)
    return output.masked_fill(torch.isneginf(norm)[..., None], 0.0), norm


def finite_norm(norm: Tensor) -> Tensor:
    """Where a query sees nothing all its scores are -inf, and exp(-inf - inf) = 0 is its weight."""
    return norm.masked_fill(torch.isneginf(norm), torch.inf)


def _group_backward(
    terms: ScoreTerms,
    block_rows: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    norms: Tensor,
    along: Tensor,
    tables: tuple[Tensor, ...],
    found: list[Tensor],
    found_tables: list[Tensor],
) -> None:
    """Adds the gradients of some heads to `found` (of queries, keys, values) and `found_tables`.

    Tensors that the terms are made of are cut off from what made them, so that each block differentiates its own part
    alone; their sums go back to queries, keys and tables at the end.
    """
    with torch.enable_grad():
        start = tuple(x.detach().requires_grad_() for x in (query, key, *tables))
        of_queries, of_keys = terms.by_query(start[0], start[2:]), terms.by_key(start[1], start[2:])
        made = (*of_queries, *of_keys, *terms.by_distance(start[2:]))
    cut = tuple(x.detach().requires_grad_(x.requires_grad) for x in made)
    sums = [torch.zeros_like(x) for x in made]
    count, to_distances = len(of_queries), len(of_keys)
    starts = range(0, query.shape[2], block_rows)
    with torch.enable_grad():
        shared = tuple(SharedRows(x, len(starts)) for x in cut[count:])
    totals = [x.new_zeros(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (key, value)]
    for begin in starts:
        rows = slice(begin, min(begin + block_rows, query.shape[2]))
        part = query[:, :, rows].detach().requires_grad_()
        own = tuple(x[:, :, rows].detach().requires_grad_(x.requires_grad) for x in cut[:count])
        with torch.enable_grad():
            of_others = (shared[:to_distances], rows, terms.last_key(rows.stop), shared[to_distances:])
            scores = terms.scores(QueryBlock(part, own, *of_others), start[2:])
        block = _Block(terms, rows, part.detach(), key, value, grad[:, :, rows], norms[:, :, rows], along[:, :, rows])
        # .data: what hides pairs overwrites numbers that no derivative reads, which a version counter cannot know.
        upstream = block.backward(scores.data, start[2:], found[0][:, :, rows], totals[0], totals[1], found_tables)
        if upstream.shape[0] > scores.shape[0]:
            upstream = upstream.sum(0, keepdim=True)
        inputs = (part, *own, *cut[count:], *start[2:])
        targets = (found[0][:, :, rows], *_rows_of(tuple(sums[:count]), rows), *sums[count:], *found_tables)
        _add_gradients((scores,), inputs, (upstream,), targets)
    for target, total in zip(found[1:], totals):
        target += total.view(target.shape)
    _add_gradients(made, start, tuple(sums), (*found[:2], *found_tables))


def _add_gradients(
    outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], upstream: tuple[Tensor, ...], targets: tuple[Tensor, ...]
) -> None:
    """Adds the gradients of `inputs` to `targets`."""
    ends = [(x, grad) for x, grad in zip(outputs, upstream) if x.requires_grad]
    wanted = [(x, target) for x, target in zip(inputs, targets) if x.requires_grad]
    if not ends or not wanted:
        return
    pieces = torch.autograd.grad([x for x, _ in ends], [x for x, _ in wanted], [g for _, g in ends], allow_unused=True)
    for (_, target), piece in zip(wanted, pieces):
        if piece is not None:
            target += piece


@dataclass
class _Block:
    """A block of queries in the backward pass; tensors [B, h, t or S, d], norms and along [B, h, t]."""

    terms: ScoreTerms
    rows: slice
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    norms: Tensor
    along: Tensor

    def backward(
        self,
        scores: Tensor,
        tables: tuple[Tensor, ...],
        grad_query: Tensor,
        grad_key: Tensor,
        grad_value: Tensor,
        grad_tables: list[Tensor],
    ) -> Tensor:
        """Gradient of the scores [B, h, t, s]; adds to those of queries [B, h, t, d], of keys and values [B h, S, d],
        and of what the terms of the values read."""
        batch, heads, length, _ = self.query.shape
        seen = scores.shape[-1]
        scores = self.terms.hide(scores, self.rows)
        flat = scores.expand(batch, *scores.shape[1:]).flatten(0, 1)
        query, key, value, grad = (x.flatten(0, 1) for x in (self.query, self.key, self.value, self.grad))
        norm, along = finite_norm(self.norms).flatten(0, 1)[..., None], self.along.flatten(0, 1)[..., None]
        whole = more = None
        if self.terms.has_values:
            whole = exp_(torch.baddbmm(flat, query, key[:, :seen].mT).sub_(norm))
            more = self._of_values(whole.view(batch, heads, length, seen), tables, grad_tables).flatten(0, 1)
        result = flat.new_empty(flat.shape)
        own = torch.zeros_like(query)
        columns = max(TILE_SCORES // (query.shape[0] * length), LEAST_COLUMNS)
        for left in range(0, seen, columns):
            tile = slice(left, min(left + columns, seen))
            near = key[:, tile]
            if whole is None or more is None:
                weights = exp_(torch.baddbmm(flat[..., tile], query, near.mT).sub_(norm))
                change = torch.bmm(grad, value[:, tile].mT)
            else:
                weights, change = whole[..., tile], torch.baddbmm(more[..., tile], grad, value[:, tile].mT)
            change = torch.mul(change.sub_(along), weights, out=result[..., tile])
            grad_value[:, tile].baddbmm_(weights.mT, grad)
            grad_key[:, tile].baddbmm_(change.mT, query)
            own.baddbmm_(change, near)
        grad_query += own.view(grad_query.shape)
        return result.view(batch, heads, length, seen)

    def _of_values(self, weights: Tensor, tables: tuple[Tensor, ...], grad_tables: list[Tensor]) -> Tensor:
        """What the terms of the values add to the gradient of the weights [B, h, t, s]."""
        weights = weights.detach().requires_grad_()
        with torch.enable_grad():
            added = self.terms.values(weights, tables, self.rows)
        result, *others = torch.autograd.grad(added, (weights, *tables), self.grad, allow_unused=True)
        for target, piece in zip(grad_tables, others):
            if piece is not None:
                target += piece
        return result
