# SPDX-License-Identifier: Apache-2.0
"""The bucketed engine's forward and backward pass as PyTorch custom operators, which ``torch.compile`` takes whole.

Rows (one batch entry, one head) are independent. For each row and round, tokens stand in the round's order and are cut
into chunks of ``size``; the queries of a chunk meet the keys of a window of chunks around it. Which pairs of a window
count is decided by one number per token and round, its *code*: key j belongs to query i if ``low <= code_i - code_j <=
high``. Penalties of that difference are added to scores with plain arithmetic, several times faster on a CPU than
boolean masks.

Rounds are joined by their log-sum-exp. The backward pass keeps only the inputs, the output and its log-sum-exp, and
recomputes the scores of a few chunks at a time, so no tensor is larger than the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..common.names import OPTIONS, operator_name
from ..common.row_lookup import rows_of_tokens
from ..common.tile_engines import Dropout, Scratch
from .rounds import LOG2_E, Layout, Round

# Scores are kept in units of log 2: on a CPU exp2 takes any argument at full speed, exp only those near zero.
_SCORES_AT_ONCE = {"cpu": 2**18}  # scores in flight: about what fits a core's cache
_SCORES_AT_ONCE_ELSEWHERE = 2**26


def _groups(q: Tensor, layout: Layout) -> Iterator[tuple[slice, slice]]:
    """Ranges of batch and heads that are worked on together."""
    batch, heads, length, _ = q.shape
    rows = max(_at_once(q) // max(length * layout.window, 1), 1)
    many = max(rows // heads, 1)
    for b in range(0, batch, many):
        for h in range(0, heads, min(rows, heads)):
            yield slice(b, min(b + many, batch)), slice(h, min(h + rows, heads))


def _segments(q: Tensor, group: Round) -> Iterator[slice]:
    """Ranges of chunks that are worked on together."""
    layout = group.layout
    many = max(_at_once(q) // (group.rows * layout.size * layout.window), 1)
    for start in range(0, group.chunks, many):
        yield slice(start, min(start + many, group.chunks))


def _at_once(q: Tensor) -> int:
    return _SCORES_AT_ONCE.get(q.device.type, _SCORES_AT_ONCE_ELSEWHERE)


def _product(name: str, one: Tensor, other: Tensor, group: Round) -> Tensor:
    """Batched matrix product in the dtype of sums."""
    out = group.scratch.get(name, one.dtype, *one.shape[:2], other.shape[2])
    torch.bmm(one, other, out=out)
    return out.to(group.sums)


def _scores(queries: Tensor, keys: Tensor, group: Round, chunks: slice) -> Tensor:
    """Masked scores [rows * chunks, size, W] of sorted, scaled queries [rows * chunks, size, d] and their windows."""
    scores = _product("scores", queries, keys.mT, group)
    group.restrict(scores.view(group.rows, -1, *scores.shape[1:]), chunks)
    return scores


def _dtypes(q: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Of sums, and of the operands of matrix products."""
    sums = torch.promote_types(q.dtype, torch.float32)
    return sums, q.dtype if q.is_cuda else sums


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _first(q: Tensor, b: slice, h: slice) -> Tensor:
    """Where the first tokens of some rows stand among `rows_of_tokens`."""
    batch, heads, length, _ = q.shape
    entries = torch.arange(batch, device=q.device)[b] * (length * heads)
    return (entries[:, None] + torch.arange(heads, device=q.device)[h]).flatten()


def _cut(x: Tensor, group: Round, chunks: slice) -> Tensor:
    """Sorted [rows, slots, width] -> chunks [rows * chunks, size, width]."""
    return _flat(x.view(group.rows, group.chunks, group.layout.size, -1)[:, chunks])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    rank: Tensor,
    code: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    layout_values: list[int],
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    layout = Layout.from_list(layout_values)
    out, lse = _empty_results(q, v)
    sums, inner = _dtypes(q)
    dropout, scratch = Dropout(dropout_p, seed, q.device), Scratch(q.device)
    with torch.autocast(q.device.type, enabled=False):
        tokens_q, tokens_k, tokens_v = (rows_of_tokens(x) for x in (q, k, v))
        for b, h in _groups(q, layout):
            places, codes, slots = (_flat(x[b, h]) for x in (order, code, rank))
            first = _first(q, b, h)
            for number in range(order.shape[2]):
                group = Round(places, codes, number, layout, sums, scratch, first, q.shape[1])
                queries = group.take("queries", tokens_q, main=True).to(inner).mul_(scale * LOG2_E)
                keys, values = group.take("keys", tokens_k).to(inner), group.take("values", tokens_v).to(inner)
                part = scratch.get("part", sums, *queries.shape[:2], v.shape[3])
                part_lse = scratch.get("part_lse", sums, *queries.shape[:2], 1)
                for chunks in _segments(q, group):
                    window = _flat(group.windows(keys, chunks))
                    scores = _scores(_cut(queries, group, chunks), window, group, chunks)
                    top = scores.amax(-1, keepdim=True)
                    mass = scores.sub_(top).exp2_().sum(-1, keepdim=True)
                    if dropout.active:
                        scores.mul_(dropout.mask(scratch.get("keep", sums, *scores.shape)))
                    window = _flat(group.windows(values, chunks))
                    result = _product("result", scores.to(inner), window, group)
                    stop = slice(chunks.start * layout.size, chunks.stop * layout.size)
                    part[:, stop] = result.div_(mass).view(group.rows, -1, v.shape[3])
                    part_lse[:, stop] = mass.log2_().add_(top).view(group.rows, -1, 1)
                part_lse = group.unsort(part_lse, slots[:, number]).clone()
                part = group.unsort(part, slots[:, number])
                if number == 0:
                    total, joint = part.clone(), part_lse
                else:
                    joint = torch.logaddexp2(joint, part_lse)
                    total.lerp_(part, (part_lse - joint).exp2_())
            out[b, h] = total.view(*q[b, h].shape[:3], -1).to(out.dtype)
            lse[b, h] = joint.view(q[b, h].shape[:3])
    if valid is not None:
        out.masked_fill_(~valid[:, None, :, None], 0.0)
    return out, lse


def _backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    rank: Tensor,
    code: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    layout_values: list[int],
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout.from_list(layout_values)
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    sums, inner = _dtypes(q)
    dropout, scratch = Dropout(dropout_p, seed, q.device), Scratch(q.device)
    with torch.autocast(q.device.type, enabled=False):
        if valid is not None:
            grad_out = grad_out.masked_fill(~valid[:, None, :, None], 0.0)
        tokens_q, tokens_k, tokens_v, tokens_grad = (rows_of_tokens(x) for x in (q, k, v, grad_out))
        for b, h in _groups(q, layout):
            delta = (grad_out[b, h].to(sums) * out[b, h]).sum(-1, keepdim=True)
            statistics = _flat(torch.cat([lse[b, h][..., None], delta], dim=-1))
            places, codes, slots = (_flat(x[b, h]) for x in (order, code, rank))
            first = _first(q, b, h)
            totals = [lse.new_zeros(*places.shape[::2], x.shape[3]) for x in (q, k, v)]
            for number in range(order.shape[2]):
                group = Round(places, codes, number, layout, sums, scratch, first, q.shape[1])
                queries = group.take("queries", tokens_q, main=True).to(inner).mul_(scale * LOG2_E)
                results = group.take("results", tokens_grad, main=True).to(inner)
                known = group.sort("known", statistics, main=True)
                keys, values = group.take("keys", tokens_k).to(inner), group.take("values", tokens_v).to(inner)
                to_queries = scratch.get("to_queries", sums, *queries.shape)
                to_keys, to_values = (
                    scratch.get(name, sums, *x.shape).zero_() for name, x in (("to_keys", keys), ("to_values", values))
                )
                for chunks in _segments(q, group):
                    own, window = _cut(queries, group, chunks), _flat(group.windows(keys, chunks))
                    above, log_mass = _cut(results, group, chunks), _cut(known, group, chunks)
                    weights = _scores(own, window, group, chunks).sub_(log_mass[..., :1]).exp2_()
                    slopes = _product("slopes", above, _flat(group.windows(values, chunks)).mT, group)
                    kept = weights
                    if dropout.active:
                        kept = dropout.mask(scratch.get("keep", sums, *weights.shape))
                        slopes.mul_(kept)
                        kept.mul_(weights)
                    _fold(to_values, _product("window", kept.mT.to(inner), above, group), group, chunks)
                    slopes.sub_(log_mass[..., 1:]).mul_(weights)
                    group.drop_own(slopes.view(group.rows, -1, *slopes.shape[1:]), chunks)
                    slopes = slopes.to(inner)
                    stop = slice(chunks.start * layout.size, chunks.stop * layout.size)
                    result = _product("result", slopes, window, group)
                    to_queries[:, stop] = result.view(group.rows, -1, q.shape[3])
                    _fold(to_keys, _product("window", slopes.mT, own, group), group, chunks)
                totals[0] += group.unsort(to_queries, slots[:, number])
                group.add_windows(totals[1], to_keys, slots[:, number])
                group.add_windows(totals[2], to_values, slots[:, number])
            totals[0].mul_(scale)
            totals[1].mul_(1 / LOG2_E)  # the queries that it was summed from carry this factor
            for grad, total in zip(grads, totals, strict=True):
                grad[b, h] = total.view(grad[b, h].shape).to(grad.dtype)
    return grads


def _fold(target: Tensor, grads: Tensor, group: Round, chunks: slice) -> None:
    """Adds gradients of overlapping windows [rows * chunks, W, width] to their slots [rows, E, width]."""
    size = group.layout.size
    grads = grads.view(group.rows, -1, *grads.shape[1:])
    count = (chunks.stop - chunks.start) * size
    for shift in range(0, group.layout.window, size):
        start = chunks.start * size + shift
        target[:, start : start + count] += grads[:, :, shift : shift + size].reshape(group.rows, count, -1)


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output laid out [B, T, H, d] in memory, as the projection that follows reads it, and its log-sum-exp (base
    2)."""
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, torch.empty(q.shape[:3], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))


forward_op = torch.library.custom_op(operator_name(__name__, "bucketed"), _forward, **OPTIONS)
backward_op = torch.library.custom_op(operator_name(__name__, "bucketed_backward"), _backward, **OPTIONS)


@forward_op.register_fake
def _(q, k, v, *rest):
    return _empty_results(q, v)


@backward_op.register_fake
def _(grad_out, out, lse, q, k, v, *rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output) -> None:
    q, k, v, order, rank, code, valid, seed, *rest = inputs
    ctx.save_for_backward(*output, q, k, v, order, rank, code, valid, seed)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 11
    return (*backward_op(grad_out, *ctx.saved_tensors, *ctx.rest), *(None,) * 8)


forward_op.register_autograd(_autograd, setup_context=_setup)


def sorted_codes(
    labels: Tensor, valid: Tensor | None, num_labels: int, recent: int | None, layout: Layout, own_label: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Order, rank and code of every token in every round, each [B, H, R, T].

    Tokens are ordered by (label, position), padding last. With `recent`, codes put a gap of more than `recent` between
    labels, so that a difference of at most `recent` means "same label, that many tokens apart"; otherwise they tell
    label and chunk.
    """
    if valid is not None:
        labels = labels.masked_fill(~valid[:, None, None], num_labels)
    order = torch.sort(labels, dim=-1, stable=True).indices
    places = torch.arange(labels.shape[-1], device=labels.device)
    rank = torch.empty_like(order).scatter_(-1, order, places.expand_as(order))
    if recent is not None:
        code, most = rank + labels * (recent + 1), labels.shape[-1] + (num_labels + 1) * (recent + 1)
    else:
        group = labels if own_label else (labels == num_labels).long()
        step = -(-labels.shape[-1] // layout.size) + layout.before + layout.after + 1
        code, most = (0 if layout.circular else rank // layout.size) + group * step, (num_labels + 2) * step
    dtype = torch.float32 if most < 2**22 else torch.float64  # whole and half numbers stay exact
    return order.int(), rank.int(), code.to(dtype)


def default_chunk(window: int, length: int) -> int:
    """Chunk length for windows of `window` tokens: short chunks waste few pairs, long ones multiply faster."""
    size = 2 ** max(math.ceil(math.log2(max(window, 1) / 4)), 5)
    return max(min(size, 128, length), 1)
