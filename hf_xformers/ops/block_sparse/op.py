# SPDX-License-Identifier: Apache-2.0
"""The block-sparse engine as PyTorch custom operators, which `torch.compile` takes whole and autograd knows.

A pattern enters as its integer key, because an operator cannot take Python objects; everything that depends on the
pattern (grouping of heads, plan) happens inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.kept import kept
from ..common.names import OPTIONS, operator_name
from ..common.tile_engines import Dropout
from .kernel import Hidden, Source, backward_tiles, forward_tiles
from .pattern_atoms import Band
from .pattern_base import Everything, Pattern, pattern_from_key
from .plan import make_plan
from .tiles import Part


@dataclass(frozen=True)
class Piece:
    """Neighboring heads with equal pattern, the keys that they can reach at all, and the parts to walk.

    Positions in the parts are absolute ones minus `shift`.
    """

    heads: slice
    kv_heads: slice
    keys: slice
    parts: tuple[Part, ...]
    side_parts: tuple[Part, ...]
    shift: int


def bound_rows(pattern: Pattern, lengths: Tensor | None, batch: int) -> list[tuple[slice, Pattern]]:
    """Runs of rows of the batch whose lengths [B] (`None`: those of the padded batch) make the pattern the same, and
    it."""
    if lengths is None:
        return [(slice(0, batch), pattern)]
    runs: list[tuple[slice, Pattern]] = []
    for row, length in enumerate(lengths.tolist()):
        bound = pattern.bind(length)
        if runs and runs[-1][1] == bound:
            runs[-1] = (slice(runs[-1][0].start, row + 1), runs[-1][1])
        else:
            runs.append((slice(row, row + 1), bound))
    return runs


@kept(256)
def make_pieces(
    pattern: Pattern,
    causal: bool,
    heads: tuple[int, int],
    lengths: tuple[int, int, int],
    offsets: tuple[int, int],
) -> list[Piece]:
    """Pieces for (query heads, key/value heads), lengths (queries, keys, side keys) and offsets (queries, keys)."""
    (num_heads, num_kv_heads), (q_len, k_len, _), (_, k_offset) = heads, lengths, offsets
    if q_len == 0:
        return []
    pattern = (pattern & Band(None, 0) if causal else pattern).bind(k_offset + k_len)
    ratio = num_heads // num_kv_heads
    runs: list[tuple[Pattern, int, int]] = []
    for head in range(num_heads):
        own = pattern.for_head(head)
        # A run ends with its pattern; a run that is not made of whole groups stays inside one group.
        if runs and runs[-1][0] == own and (runs[-1][1] % ratio == 0 or head % ratio):
            runs[-1] = (own, runs[-1][1], head + 1)
        else:
            runs.append((own, head, head + 1))
    pieces = []
    for own, first, last in runs:
        whole = last - (last - first) % ratio if first % ratio == 0 and last - first > ratio else last
        for begin, end in ((first, whole), (whole, last)):
            if begin < end:
                kv_heads = slice(begin // ratio, (end - 1) // ratio + 1)
                pieces.append(_piece(own, slice(begin, end), kv_heads, lengths, offsets))
    return pieces


def _piece(
    pattern: Pattern,
    heads: slice,
    kv_heads: slice,
    lengths: tuple[int, int, int],
    offsets: tuple[int, int],
) -> Piece:
    (q_len, k_len, side_len), (q_offset, k_offset) = lengths, offsets
    # Only keys that some query may read: a decoding step over a long cache stays a short problem.
    low, high = pattern.span(q_offset, q_offset + q_len - 1)
    begin = 0 if low is None else min(max(low - k_offset, 0), k_len)
    end = k_len if high is None else max(min(high - k_offset + 1, k_len), begin)
    # Equal plans for equal geometry: moving both sides by a multiple of the period changes nothing.
    shift = min(q_offset, k_offset + begin)
    shift = shift - shift % pattern.period if pattern.period else 0
    parts = make_plan(pattern, q_len, end - begin, q_offset - shift, k_offset + begin - shift)
    side_parts = make_plan(Everything(), q_len, side_len) if side_len else ()
    return Piece(heads, kv_heads, slice(begin, end), parts, side_parts, shift)


def _work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    side_k: Tensor | None,
    side_v: Tensor | None,
    side_mask: Tensor | None,
    segments: Tensor | None,
    extras: list[Tensor],
    runs: list[tuple[slice, list[Piece]]],
    first_key: int,
) -> Iterator[tuple[slice, Piece, slice, slice, list[Source], int]]:
    """Cut the call into jobs: (batch range, piece, query heads, key/value heads, sources, first of their extras)."""
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    key_hidden, side_hidden = _additive(key_mask, dtype), _additive(side_mask, dtype)
    if side_hidden is not None and side_hidden.ndim == 2:
        side_hidden = side_hidden[:, None]
    number = 0
    for rows, piece in ((rows, piece) for rows, pieces in runs for piece in pieces):
        ratio = (piece.heads.stop - piece.heads.start) // (piece.kv_heads.stop - piece.kv_heads.start)
        counts = [len(part.tiles) for part in (*piece.parts, *piece.side_parts)]
        for b, kv in _shares(rows, piece.kv_heads, whole=q.dtype == dtype):
            begin = piece.heads.start + (kv.start - piece.kv_heads.start) * ratio
            heads = slice(begin, begin + (kv.stop - kv.start) * ratio)
            queries = q[b, heads].unflatten(1, (-1, ratio)).to(dtype)
            keys = (k[b, kv, piece.keys].to(dtype), v[b, kv, piece.keys].to(dtype))
            hidden = Hidden(
                None if key_hidden is None else key_hidden[b, piece.keys],
                None if side_hidden is None else side_hidden[b],
                None
                if segments is None
                else (segments[b, first_key : first_key + q.shape[2]], segments[b, piece.keys]),
            )
            sources: list[Source] = []
            used = number
            for part, count in zip((*piece.parts, *piece.side_parts), counts, strict=True):
                own = [_share(extra, b, heads, piece.heads) for extra in extras[used : used + count]]
                side, both = len(sources) >= len(piece.parts), keys
                if side and side_k is not None and side_v is not None:
                    both = (side_k[b, kv].to(dtype), side_v[b, kv].to(dtype))
                sources.append(Source(part, side, queries, both, hidden, own))
                used += count
            yield b, piece, heads, kv, sources, number
        number += sum(counts) if extras else 0


def _share(extra: Tensor, b: slice, heads: slice, of: slice) -> Tensor:
    extra = extra[b] if extra.shape[0] > 1 else extra
    return extra[:, heads.start - of.start : heads.stop - of.start] if extra.shape[1] > 1 else extra


def _shares(rows: slice, kv_heads: slice, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Everything at once; in half precision in about eight shares, because each is held in float32 meanwhile."""
    if whole:
        yield rows, kv_heads
        return
    batch, many = rows.stop - rows.start, kv_heads.stop - kv_heads.start
    run = max(many * batch // 8, 1)
    for b in range(rows.start, rows.stop, max(run // many, 1)):
        for h in range(kv_heads.start, kv_heads.stop, min(run, many)):
            yield slice(b, min(b + max(run // many, 1), rows.stop)), slice(h, min(h + min(run, many), kv_heads.stop))


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    # On the CPU a mask that hides nothing costs one look; on an accelerator looking would mean waiting.
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def pieces_of_rows(
    q: Tensor,
    k: Tensor,
    side_k: Tensor | None,
    row_lengths: Tensor | None,
    geometry: Sequence[int],
    pattern: Pattern,
) -> list[tuple[slice, list[Piece]]]:
    """Runs of rows of the batch, and the pieces of each; geometry is (q_offset, k_offset, causal)."""
    q_offset, k_offset, causal = geometry
    lengths = (q.shape[2], k.shape[2], 0 if side_k is None else side_k.shape[2])
    heads = (q.shape[1], k.shape[1])
    return [
        (rows, make_pieces(bound, bool(causal), heads, lengths, (q_offset, k_offset)))
        for rows, bound in bound_rows(pattern, row_lengths, q.shape[0])
    ]


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    return out, torch.empty(q.shape[:3], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    side_k: Tensor | None,
    side_v: Tensor | None,
    side_mask: Tensor | None,
    segments: Tensor | None,
    extras: list[Tensor],
    row_lengths: Tensor | None,
    seed: Tensor | None,
    geometry: list[int],
    pattern_key: int,
    scale: float,
    dropout_p: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_results(q, v)
    out.zero_()
    lse.fill_(-math.inf)
    runs = pieces_of_rows(q, k, side_k, row_lengths, geometry, pattern_from_key(pattern_key))
    dropout = Dropout(dropout_p, seed, q.device)
    work = _work(q, k, v, key_mask, side_k, side_v, side_mask, segments, extras, runs, geometry[0] - geometry[1])
    with torch.autocast(q.device.type, enabled=False):
        for b, _, heads, kv, sources, _ in work:
            groups = (kv.stop - kv.start, -1)
            part_out, part_lse = out[b, heads].unflatten(1, groups), lse[b, heads].unflatten(1, groups)[..., None]
            if out.dtype == lse.dtype:
                forward_tiles(sources, scale, cap, dropout, part_out, part_lse)
            else:
                precise = torch.zeros_like(part_out, dtype=lse.dtype)
                forward_tiles(sources, scale, cap, dropout, precise, part_lse)
                part_out.copy_(precise)
    return out, lse


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    side_k: Tensor | None,
    side_v: Tensor | None,
    side_mask: Tensor | None,
    segments: Tensor | None,
    extras: list[Tensor],
    row_lengths: Tensor | None,
    seed: Tensor | None,
    geometry: list[int],
    pattern_key: int,
    scale: float,
    dropout_p: float,
    cap: float,
) -> list[Tensor]:
    side = [] if side_k is None or side_v is None else [side_k, side_v]
    grads = [torch.zeros_like(x) for x in (q, k, v, *side)]
    extra_grads = [torch.zeros_like(extra, dtype=lse.dtype) for extra in extras]
    runs = pieces_of_rows(q, k, side_k, row_lengths, geometry, pattern_from_key(pattern_key))
    dropout = Dropout(dropout_p, seed, q.device)
    work = _work(q, k, v, key_mask, side_k, side_v, side_mask, segments, extras, runs, geometry[0] - geometry[1])
    delta = (grad_out.to(lse.dtype) * out).sum(-1) if out.dtype == lse.dtype else _row_products(grad_out, out, lse)
    if grad_lse is not None:
        delta -= grad_lse
    with torch.autocast(q.device.type, enabled=False):
        for b, piece, heads, kv, sources, number in work:
            groups = (kv.stop - kv.start, -1)
            targets = [grads[0][b, heads].unflatten(1, groups), *(grad[b, kv] for grad in grads[1:])]
            targets[1:3] = [target[:, :, piece.keys] for target in targets[1:3]]
            own = targets
            if lse.dtype != q.dtype:
                own = [torch.zeros_like(target, dtype=lse.dtype) for target in targets]
            backward_tiles(
                sources,
                scale,
                cap,
                dropout,
                grad_out[b, heads].unflatten(1, groups).to(lse.dtype),
                delta[b, heads].unflatten(1, groups)[..., None],
                lse[b, heads].unflatten(1, groups)[..., None],
                own[0],
                (own[1], own[2]),
                (own[3], own[4]) if side else None,
                [_share(grad, b, heads, piece.heads) for grad in extra_grads[number:]],
            )
            if own is not targets:
                for target, precise in zip(targets, own, strict=True):
                    target.add_(precise.to(target.dtype))
    for grad in (grads[0], grads[1], *grads[3:4]):
        grad.mul_(scale)
    return grads + [grad.to(extra.dtype) for grad, extra in zip(extra_grads, extras, strict=True)]


def _row_products(grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """rowsum(dO * O) in float32, head by head so that no full-size float32 copy exists."""
    delta = torch.empty_like(lse)
    for head in range(out.shape[1]):
        delta[:, head] = (grad_out[:, head].to(lse.dtype) * out[:, head]).sum(-1)
    return delta


forward_op = torch.library.custom_op(operator_name(__name__, "block_sparse"), _forward, **OPTIONS)
backward_op = torch.library.custom_op(operator_name(__name__, "block_sparse_backward"), _backward, **OPTIONS)


@forward_op.register_fake
def _(q, k, v, *rest):
    return _empty_results(q, v)


@backward_op.register_fake
def _(grad_out, grad_lse, out, lse, q, k, v, key_mask, side_k, side_v, side_mask, segments, extras, *rest):
    side = [] if side_k is None or side_v is None else [side_k, side_v]
    return [torch.empty_like(x) for x in (q, k, v, *side, *extras)]


def _setup(ctx, inputs, output) -> None:
    *tensors, extras, row_lengths, seed, geometry, key, scale, dropout_p, cap = inputs
    ctx.save_for_backward(*output, *tensors, row_lengths, seed, *extras)
    ctx.rest = (geometry, key, scale, dropout_p, cap)
    ctx.pattern = pattern_from_key(key)  # keeps it alive until the backward pass


def _autograd(ctx, grad_out, grad_lse):
    out, lse, q, k, v, key_mask, side_k, side_v, side_mask, segments, row_lengths, seed, *extras = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    tensors = (q, k, v, key_mask, side_k, side_v, side_mask, segments, extras, row_lengths, seed)
    grads = backward_op(grad_out, grad_lse, out, lse, *tensors, *ctx.rest)
    side = (None, None) if side_k is None else tuple(grads[3:5])
    extra_grads = grads[3 if side_k is None else 5 :]
    return (*grads[:3], None, *side, None, None, extra_grads, *(None,) * 7)


forward_op.register_autograd(_autograd, setup_context=_setup)
