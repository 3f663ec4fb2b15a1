# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of block-sparse attention: one softmax over all parts of a plan, forward and backward, in tiles.

Every query keeps the running logarithm of its softmax denominator, so parts (window, gathered blocks, columns, side
keys) join exactly as if their scores stood in one row (the log-sum-exp merge of FlashAttention, Dao et al. 2022,
section 3.1). The backward pass recomputes the scores of a tile from queries, keys and that logarithm; nothing of the
size of the scores is kept.

Queries, outputs and their gradients are [B, K, G, T, d] here: K key/value heads, G query heads to each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..common.tile_engines import Dropout, Scratch
from .plan import TILE_BUDGET
from .tiles import Part, Tiles

# ------------------------------------------------------------------------------------------ reading and writing tiles


def _q_view(x: Tensor, tiles: Tiles) -> Tensor:
    """[B, K, G, T, d] -> view [B, K, classes, blocks, G, rows, d]."""
    batch, heads, group, token, channel = x.stride()
    size = (*x.shape[:3], tiles.classes, tiles.blocks, tiles.rows, x.shape[4])
    stride = (batch, heads, group, token, tiles.gap * tiles.step * token, tiles.gap * token, channel)
    return x.as_strided(size, stride, x.storage_offset() + tiles.q_start * token).permute(0, 1, 3, 4, 2, 5, 6)


def _k_view(x: Tensor, tiles: Tiles, begin: int = 0, width: int | None = None) -> Tensor:
    """[B, K, T, d] -> view [B, K, classes, blocks, width, d] of the window's keys `begin..begin + width - 1`."""
    batch, heads, token, channel = x.stride()
    width = tiles.width if width is None else width
    size = (*x.shape[:2], tiles.classes, tiles.blocks, width, x.shape[3])
    stride = (batch, heads, token, tiles.gap * tiles.step * token, tiles.gap * token, channel)
    return x.as_strided(size, stride, x.storage_offset() + (tiles.k_start + tiles.gap * begin) * token)


def _load_q(x: Tensor, tiles: Tiles) -> Tensor:
    """[B, K, G, T, d] -> [B * K * tiles, G * rows, d]."""
    if tiles.q_index is None:
        view = _q_view(x, tiles)
    else:
        picked = x.index_select(3, tiles.q_index.flatten().to(x.device))
        view = picked.unflatten(3, tuple(tiles.q_index.shape)).permute(0, 1, 3, 2, 4, 5)
    return view.reshape(-1, x.shape[2] * tiles.rows, x.shape[4])


def _put_q(x: Tensor, tiles: Tiles, value: Tensor, add: bool = False) -> None:
    """The inverse of `_load_q`: overwrite, or add to, the rows of `x`."""
    if tiles.q_index is None:
        view = _q_view(x, tiles)
        value = value.view(view.shape)
        view.add_(value) if add else view.copy_(value)
        return
    value = value.view(*x.shape[:2], tiles.blocks, x.shape[2], tiles.rows, x.shape[4])
    value = value.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).to(x.dtype)
    index = tiles.q_index.flatten().to(x.device)
    x.index_add_(3, index, value) if add else x.index_copy_(3, index, value)


def _load_k(x: Tensor, tiles: Tiles) -> Tensor:
    """[B, K, T, d] -> [B * K * tiles, width, d]."""
    if tiles.k_index is None:
        return _k_view(x, tiles).reshape(-1, tiles.width, x.shape[3])
    return x.index_select(2, tiles.k_index.flatten().to(x.device)).reshape(-1, tiles.width, x.shape[3])


def _add_k(x: Tensor, tiles: Tiles, value: Tensor) -> None:
    """Add the gradient [B * K * tiles, width, d] of the loaded windows to `x`; windows may overlap."""
    if tiles.k_index is not None:
        x.index_add_(2, tiles.k_index.flatten().to(x.device), value.view(*x.shape[:2], -1, x.shape[3]))
        return
    value = value.view(*x.shape[:2], tiles.classes, tiles.blocks, tiles.width, x.shape[3])
    # Pieces as long as the step do not overlap from one block to the next.
    piece = tiles.width if tiles.blocks == 1 else min(tiles.step, tiles.width)
    for begin in range(0, tiles.width, piece):
        chunk = value[..., begin : begin + piece, :]
        _k_view(x, tiles, begin, chunk.shape[-2]).add_(chunk)


# ------------------------------------------------------------------------------------------------------- the work


class Hidden(NamedTuple):
    """What hides pairs besides the pattern; everything is optional. Additive terms are 0 or -inf."""

    key: Tensor | None = None  # [B, T_k] additive
    side: Tensor | None = None  # [B, 1 or T_q, T_s] additive
    segments: tuple[Tensor, Tensor] | None = None  # document numbers [B, T_q] and [B, T_k]


class Source:
    """One part's queries, keys and values: the whole sequences, or the few rows and columns gathered from them."""

    def __init__(
        self, part: Part, side: bool, q: Tensor, keys: tuple[Tensor, Tensor], hidden: Hidden, extra: list[Tensor]
    ):
        self.part, self.side, self.hidden, self.extra = part, side, hidden, extra
        self.rows = None if part.rows is None else part.rows.to(q.device)
        self.columns = None if part.columns is None else part.columns.to(q.device)
        self.q, (self.k, self.v) = self.pick_rows(q), keys
        if self.columns is not None:
            self.k, self.v = self.k.index_select(2, self.columns), self.v.index_select(2, self.columns)
            if hidden.key is not None:
                self.hidden = self.hidden._replace(key=hidden.key.index_select(1, self.columns))
        if hidden.segments is not None:
            own, other = hidden.segments
            own = own if self.rows is None else own.index_select(1, self.rows)
            other = other if self.columns is None else other.index_select(1, self.columns)
            self.hidden = self.hidden._replace(segments=(own, other))

    def pick_rows(self, x: Tensor) -> Tensor:
        """[B, K, G, T, d] -> its rows of this part."""
        return x if self.rows is None else x.index_select(3, self.rows)

    def chunks(self, tiles: Tiles) -> Iterator[tuple[slice, slice]]:
        """Ranges of batch and key/value heads whose scores together fit the budget."""
        (batch, kv_heads, ratio), on_cpu = self.q.shape[:3], self.q.device.type == "cpu"
        cost = tiles.count * ratio * tiles.rows * tiles.width
        together = max((TILE_BUDGET if on_cpu else 16 * TILE_BUDGET) // cost, 1)
        if on_cpu and tiles.count > 1 and cost * 16 > TILE_BUDGET:
            together = 1  # the windows of one head are a view, those of several would be copied
        heads, batches = min(kv_heads, together), max(together // kv_heads, 1)
        if on_cpu and kv_heads * cost * 8 > TILE_BUDGET:
            batches = 1  # heads of one row are a view too, those of several rows usually are not
        for b in range(0, batch, batches):
            for h in range(0, kv_heads, heads):
                yield slice(b, b + batches), slice(h, h + heads)

    def scores(
        self,
        tiles: Tiles,
        pieces: list[tuple[int, int, Tensor]],
        b: slice,
        h: slice,
        q: Tensor,
        k: Tensor,
        scale: float,
        cap: float,
        out: Tensor,
        slope: Tensor | None = None,
    ) -> None:
        """Write scale * q k^T to `out` [batch * heads * tiles, G * rows, width], hidden pairs at -inf. With a cap c >
        0 they are c tanh(scale * q k^T / c), whose derivative by scale * q k^T goes to `slope`."""
        ratio, rows, width = self.q.shape[2], tiles.rows, tiles.width
        torch.baddbmm(out, q, k.transpose(1, 2), beta=0, alpha=scale / cap if cap else scale, out=out)
        if cap:
            out.tanh_()
            if slope is not None:
                torch.mul(out, out, out=slope).neg_().add_(1.0)
            out.mul_(cap)
        batch, count = self.q[b].shape[0], tiles.count
        pairs = out.view(batch, -1, count, ratio, rows, width)
        for begin, end, bias in pieces:
            pairs[..., begin:end] += bias[:, None]
        if self.side and self.hidden.side is not None:
            mask = self.hidden.side[b, :, tiles.k_start : tiles.k_start + width]
            mask = mask[:, tiles.q_start : tiles.q_start + rows] if mask.shape[1] > 1 else mask
            pairs += mask[:, None, None, None]
        if not self.side and self.hidden.key is not None:
            mask = _load_k(self.hidden.key[b, None, :, None], tiles)
            # On an accelerator looking would mean waiting for it.
            if mask.device.type != "cpu" or bool(mask.any()):
                pairs += mask.view(batch, 1, count, 1, 1, width)
        if not self.side and self.hidden.segments is not None:
            own = _load_q(self.hidden.segments[0][b, None, None, :, None], tiles).view(batch, 1, count, 1, rows, 1)
            other = _load_k(self.hidden.segments[1][b, None, :, None], tiles).view(batch, 1, count, 1, 1, width)
            pairs.masked_fill_(own != other, -math.inf)
        if self.extra:
            pairs += _as_pairs(self.extra[0], ratio, b, h)


def _as_pairs(extra: Tensor, ratio: int, b: slice, h: slice) -> Tensor:
    """Score bias [B or 1, H or 1, tiles or 1, rows, width] -> [B, K, tiles, G, rows, width] for a range of both."""
    kv_heads = extra.shape[1] // ratio if extra.shape[1] > 1 else 1
    extra = extra.unflatten(1, (kv_heads, -1)).permute(0, 1, 3, 2, 4, 5)
    extra = extra[b] if extra.shape[0] > 1 else extra
    return extra[:, h] if kv_heads > 1 else extra


def _sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    several = [d for d, size in enumerate(shape) if size == 1 and x.shape[d] != 1]
    return x.sum(several, keepdim=True) if several else x  # no dimension at all would mean every one


@overload
def _softmax(scores: Tensor, need_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...


@overload
def _softmax(scores: Tensor, need_lse: bool) -> tuple[Tensor, Tensor | None]: ...


def _softmax(scores: Tensor, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Weights (zero in rows without a key) and, if wanted, the log-sum-exp [.., 1] (-inf there); destroys `scores`.

    torch.softmax and not exp: the CPU kernel of exp is slow where the result underflows, and every hidden pair does.
    The log-sum-exp is the largest score less the logarithm of its weight.
    """
    top = scores.amax(-1, keepdim=True)
    on_cpu = scores.device.type == "cpu"
    weights = torch.softmax(scores, -1, out=scores) if on_cpu else scores.softmax(-1)
    empty = top == -math.inf
    some = not on_cpu or bool(empty.any())
    if some:
        weights.masked_fill_(empty, 0.0)
    if not need_lse:
        return weights, None
    peak = weights.amax(-1, keepdim=True)
    if some:
        peak.masked_fill_(empty, 1.0)
    return weights, top.sub_(peak.log_())


def forward_tiles(sources: list[Source], scale: float, cap: float, dropout: Dropout, out: Tensor, lse: Tensor) -> None:
    """Fill `out` [B, K, G, T, dv] (zeros before) and `lse` [B, K, G, T, 1] (-inf before)."""
    scratch = Scratch(lse.device)
    for number, source in enumerate(sources):
        part_out, part_lse = source.pick_rows(out), source.pick_rows(lse)
        for tiles in source.part.tiles:
            pieces = source.part.hidden(tiles, lse.dtype, lse.device)
            for b, h in source.chunks(tiles):
                q, k = _load_q(source.q[b, h], tiles), _load_k(source.k[b, h], tiles)
                scores = scratch.get("scores", lse.dtype, *q.shape[:2], tiles.width)
                source.scores(tiles, pieces, b, h, q, k, scale, cap, scores)
                weights, joint = _softmax(scores, need_lse=True)
                if dropout.active:
                    weights.mul_(dropout.mask(scratch.get("keep", lse.dtype, *weights.shape)))
                result = torch.bmm(weights, _load_k(source.v[b, h], tiles))
                if number:  # join two softmax averages over disjoint keys
                    before, own = _load_q(part_lse[b, h], tiles), joint
                    joint = torch.logaddexp(before, own)
                    base = joint.masked_fill(joint == -math.inf, 0.0)
                    result.mul_((own - base).exp_())
                    result.addcmul_(_load_q(part_out[b, h], tiles), (before - base).exp_())
                _put_q(part_out[b, h], tiles, result)
                _put_q(part_lse[b, h], tiles, joint)
            source.extra = source.extra[1:]
        if source.rows is not None:
            out.index_copy_(3, source.rows, part_out)
            lse.index_copy_(3, source.rows, part_lse)


def backward_tiles(
    sources: list[Source],
    scale: float,
    cap: float,
    dropout: Dropout,
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    grads: tuple[Tensor, Tensor],
    side_grads: tuple[Tensor, Tensor] | None,
    extra_grads: list[Tensor],
) -> None:
    """Add the gradients, those of queries and keys still without the factor `scale`.

    With weights P and delta = rowsum(dO * O) - d(lse): dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale * dS K,
    dK = scale * dS^T Q; with a cap, dS is multiplied by its slope before the last two. Where P is the softmax of one
    part alone, its share exp(lse_part - lse) of the row goes into dO and delta instead.
    """
    scratch = Scratch(lse.device)
    extra_grads = list(extra_grads)
    for source in sources:
        part_out, part_delta, part_lse = (source.pick_rows(x) for x in (grad_out, delta, lse))
        part_q = grad_q if source.rows is None else torch.zeros_like(source.q)
        part_k, part_v = side_grads if source.side and side_grads is not None else grads
        if source.columns is not None:
            part_k, part_v = torch.zeros_like(source.k), torch.zeros_like(source.v)
        for tiles in source.part.tiles:
            pieces = source.part.hidden(tiles, lse.dtype, lse.device)
            for b, h in source.chunks(tiles):
                q, k = _load_q(source.q[b, h], tiles), _load_k(source.k[b, h], tiles)
                v, d_out = _load_k(source.v[b, h], tiles), _load_q(part_out[b, h], tiles)
                scores = scratch.get("scores", lse.dtype, *q.shape[:2], tiles.width)
                slope = scratch.get("slope", lse.dtype, *scores.shape) if cap else None
                source.scores(tiles, pieces, b, h, q, k, scale, cap, scores, slope)
                weights, own = _softmax(scores, need_lse=len(sources) > 1)
                d_delta = _load_q(part_delta[b, h], tiles)
                if own is not None:
                    total = _load_q(part_lse[b, h], tiles)
                    share = (own - total.masked_fill(total == -math.inf, 0.0)).exp_()
                    d_out, d_delta = d_out * share, d_delta * share
                d_scores = scratch.get("grads", lse.dtype, *weights.shape)
                if not dropout.active:
                    torch.baddbmm(d_delta, d_out, v.transpose(1, 2), beta=-1, out=d_scores)
                    _add_k(part_v[b, h], tiles, torch.bmm(weights.transpose(1, 2), d_out))
                else:
                    keep = dropout.mask(scratch.get("keep", lse.dtype, *weights.shape))
                    torch.bmm(d_out, v.transpose(1, 2), out=d_scores).mul_(keep).sub_(d_delta)
                    _add_k(part_v[b, h], tiles, torch.bmm(keep.mul_(weights).transpose(1, 2), d_out))
                d_scores.mul_(weights)
                if extra_grads:
                    view = d_scores.view(*source.q[b, h].shape[:2], tiles.count, -1, tiles.rows, tiles.width)
                    target = _as_pairs(extra_grads[0], source.q.shape[2], b, h)
                    target += _sum_to(view, target.shape)
                if slope is not None:
                    d_scores.mul_(slope)
                _put_q(part_q[b, h], tiles, torch.bmm(d_scores, k), add=True)
                _add_k(part_k[b, h], tiles, torch.bmm(d_scores.transpose(1, 2), q))
            source.extra, extra_grads = source.extra[1:], extra_grads[1:]
        if source.rows is not None:
            grad_q.index_add_(3, source.rows, part_q)
        if source.columns is not None:
            grads[0].index_add_(2, source.columns, part_k)
            grads[1].index_add_(2, source.columns, part_v)
