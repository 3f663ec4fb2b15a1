# SPDX-License-Identifier: Apache-2.0
"""Attention inside clusters that chose their tokens, forward and backward, as PyTorch custom operators.

Every cluster of every head is a small dense attention between the rows it gathers and those it adds its results to. A
few clusters are worked on at a time, so that their scores stay in a core's cache; the backward pass keeps only the
inputs and two numbers for every place of a query, and computes scores again. Rows are those of tokens with their heads
side by side, [B T H, d], as projections leave and read them, so that nothing is laid out anew before it is
gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.names import OPTIONS, operator_name
from ..common.row_lookup import rows_of_tokens
from ..common.tile_engines import Dropout, Scratch
from .rounds import HIDDEN, LOG2_E

_SCORES_AT_ONCE = {"cpu": 2**18}
_SCORES_AT_ONCE_ELSEWHERE = 2**26


@dataclass
class _Clusters:
    """The places of N = B H C clusters.

    Args:
        queries, keys: their rows [N, w] and [N, u].
        order: positions [N, w] and [N, u] where a query reads no later key.
        readable: which places of keys are used, [N, u] (`None`: all).
    """

    queries: Tensor
    keys: Tensor
    order: tuple[Tensor, Tensor] | None
    readable: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, query_at: Tensor, key_at: Tensor, causal: bool, key_valid: Tensor | None):
        queries, keys = query_at.flatten(0, 2), key_at.flatten(0, 2)
        return cls(
            _rows_at(query_at, q.shape[2]).view_as(queries),
            _rows_at(key_at, k.shape[2]).view_as(keys),
            (queries, keys) if causal else None,
            None if key_valid is None else key_valid.flatten(0, 2),
        )

    def groups(self) -> Iterator[slice]:
        """Ranges of clusters that are worked on together."""
        count, width = self.queries.shape
        scores = _SCORES_AT_ONCE.get(self.queries.device.type, _SCORES_AT_ONCE_ELSEWHERE)
        step = max(scores // max(width * self.keys.shape[1], 1), 1)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def hidden(self, group: slice) -> Tensor | None:
        """[n, w or 1, u], True where a query may not read a key; None if it may read all."""
        hidden = None if self.readable is None else ~self.readable[group, None]
        if self.order is not None:
            queries, keys = (places[group] for places in self.order)
            later = keys[:, None] > queries[..., None]
            hidden = later if hidden is None else later | hidden
        return hidden


def _rows_at(at: Tensor, length: int) -> Tensor:
    """Places [B, H, C, w] -> rows of [B T H, d]."""
    batch, heads = at.shape[:2]
    first = torch.arange(batch, device=at.device)[:, None] * (length * heads) + torch.arange(heads, device=at.device)
    return at * heads + first[..., None, None]


def _of_rows(rows: Tensor, x: Tensor) -> Tensor:
    """[B T H, d] -> [B, H, T, d] in the dtype of x, which has these axes."""
    batch, heads, length, _ = x.shape
    return rows.view(batch, length, heads, -1).transpose(1, 2).to(x.dtype)


def _shares(clusters: _Clusters, q: Tensor, query_valid: Tensor | None) -> Tensor:
    """What a result at each place of a query counts [N, w]: one over the number of clusters that chose its token."""
    places = clusters.queries.flatten()
    used = q.new_ones(places.shape, dtype=_sums(q)) if query_valid is None else query_valid.flatten().to(_sums(q))
    count = used.new_zeros(q.shape[0] * q.shape[1] * q.shape[2]).index_add_(0, places, used)
    return count.clamp_(min=1).reciprocal_().index_select(0, places).mul_(used).view_as(clusters.queries)


def _sums(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


class _Products:
    """Gathering and multiplying into buffers. Products of half precision run in it on a GPU, and in float32
    elsewhere."""

    def __init__(self, q: Tensor):
        self.sums, self.scratch = _sums(q), Scratch(q.device)
        self.inner = q.dtype if q.is_cuda else self.sums

    def gather(self, name: str, rows: Tensor, at: Tensor) -> Tensor:
        """rows [R, d], at [n, w] -> [n, w, d]"""
        out = self.scratch.get(name, rows.dtype, at.numel(), rows.shape[1])
        torch.index_select(rows, 0, at.flatten(), out=out)
        return out.view(*at.shape, -1).to(self.inner)

    def multiply(self, name: str, one: Tensor, other: Tensor) -> Tensor:
        """Batched, in the dtype of sums."""
        one, other = one.to(self.inner), other.to(self.inner)
        out = self.scratch.get(name, self.inner, *one.shape[:2], other.shape[2])
        torch.bmm(one, other, out=out)
        return out.to(self.sums)

    def scores(self, queries: Tensor, keys: Tensor, hidden: Tensor | None) -> Tensor:
        scores = self.multiply("scores", queries, keys.mT)
        return scores if hidden is None else scores.masked_fill_(hidden, -HIDDEN)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_at: Tensor,
    key_at: Tensor,
    query_valid: Tensor | None,
    key_valid: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    clusters, products = _Clusters.of(q, k, query_at, key_at, causal, key_valid), _Products(q)
    sums, dropout = products.sums, Dropout(dropout_p, seed, q.device)
    rows_q, rows_k, rows_v = rows_of_tokens(q), rows_of_tokens(k), rows_of_tokens(v)
    total = torch.zeros(rows_q.shape[0], v.shape[3], dtype=sums, device=q.device)
    lse = torch.empty(clusters.queries.shape, dtype=sums, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        shares = _shares(clusters, q, query_valid)
        for group in clusters.groups():
            places, hidden = clusters.queries[group], clusters.hidden(group)
            queries = products.gather("queries", rows_q, places).mul_(scale * LOG2_E)
            scores = products.scores(queries, products.gather("keys", rows_k, clusters.keys[group]), hidden)
            top = scores.amax(-1, keepdim=True)
            mass = scores.sub_(top).exp2_().sum(-1, keepdim=True)
            if hidden is not None:  # who can read nothing has read everything
                shares[group].masked_fill_(hidden.all(-1), 0.0)
            if dropout.active:
                scores.mul_(dropout.mask(products.scratch.get("keep", sums, *scores.shape)))
            result = products.multiply("result", scores, products.gather("values", rows_v, clusters.keys[group]))
            result.mul_(shares[group, :, None] / mass)
            total.index_add_(0, places.flatten(), result.flatten(0, 1))
            lse[group] = mass.log2_().add_(top)[..., 0]
    return _of_rows(total, q), lse, shares


def _backward(
    grad_out: Tensor,
    lse: Tensor,
    shares: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_at: Tensor,
    key_at: Tensor,
    key_valid: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    clusters, products = _Clusters.of(q, k, query_at, key_at, causal, key_valid), _Products(q)
    sums, dropout = products.sums, Dropout(dropout_p, seed, q.device)
    rows_q, rows_k, rows_v, rows_grad = (rows_of_tokens(x) for x in (q, k, v, grad_out))
    to_q, to_k, to_v = (torch.zeros_like(rows, dtype=sums) for rows in (rows_q, rows_k, rows_v))
    with torch.autocast(q.device.type, enabled=False):
        for group in clusters.groups():
            places, sources = clusters.queries[group].flatten(), clusters.keys[group].flatten()
            queries = products.gather("queries", rows_q, clusters.queries[group]).mul_(scale * LOG2_E)
            keys = products.gather("keys", rows_k, clusters.keys[group])
            above = products.gather("above", rows_grad, clusters.queries[group]).mul_(shares[group, :, None])
            weights = products.scores(queries, keys, clusters.hidden(group)).sub_(lse[group, :, None]).exp2_()
            slopes = products.multiply("slopes", above, products.gather("values", rows_v, clusters.keys[group]).mT)
            kept = weights
            if dropout.active:
                kept = dropout.mask(products.scratch.get("keep", sums, *weights.shape))
                slopes.mul_(kept)
                kept.mul_(weights)
            to_v.index_add_(0, sources, products.multiply("window", kept.mT, above).flatten(0, 1))
            # The softmax takes its weighted mean off every slope.
            mean = torch.linalg.vecdot(weights, slopes)[..., None]
            slopes.sub_(mean).mul_(weights)
            to_q.index_add_(0, places, products.multiply("result", slopes, keys).mul_(scale).flatten(0, 1))
            to_keys = products.multiply("window", slopes.mT, queries)
            to_keys.mul_(1 / LOG2_E)  # a factor that the queries carry
            to_k.index_add_(0, sources, to_keys.flatten(0, 1))
    return _of_rows(to_q, q), _of_rows(to_k, k), _of_rows(to_v, v)


forward_op = torch.library.custom_op(operator_name(__name__, "clusters"), _forward, **OPTIONS)
backward_op = torch.library.custom_op(operator_name(__name__, "clusters_backward"), _backward, **OPTIONS)


def _empty_like(x: Tensor, width: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


@forward_op.register_fake
def _(q, k, v, query_at, *rest):
    places = query_at.flatten(0, 2)
    return (_empty_like(q, v.shape[3]), *(q.new_empty(places.shape, dtype=_sums(q)) for _ in range(2)))


@backward_op.register_fake
def _(grad_out, lse, shares, q, k, v, *rest):
    return tuple(_empty_like(x, x.shape[3]) for x in (q, k, v))


def _setup(ctx, inputs, output) -> None:
    q, k, v, query_at, key_at, _, key_valid, seed, *rest = inputs
    ctx.save_for_backward(*output[1:], q, k, v, query_at, key_at, key_valid, seed)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_out, *others):
    if grad_out is None:
        return (None,) * 11
    return (*backward_op(grad_out, *ctx.saved_tensors, *ctx.rest), *(None,) * 8)


forward_op.register_autograd(_autograd, setup_context=_setup)
