# SPDX-License-Identifier: Apache-2.0
"""Texts that are divided over processes: where the parts stand, and how tensors of tokens and sums go between them.

Every process holds one part of every row, all parts of one length and in the order of the processes. Each exchange
here has a gradient, that of the sum of all processes' losses (as [`core.distributed`]): where one process's tensor is
read by others, what it gets back is the sum of what they found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Span = tuple[int, int]


class Division(NamedTuple):
    """The processes that hold the parts of every text; group `None`: all."""

    group: Any

    @torch.compiler.disable
    def total(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor, with the gradient of the sum of all processes' losses."""
        return _Total.apply(tensor, self.group)


_division: Division | None = None  # a plain variable, which a compiler watches


def division_in_force() -> Division | None:
    """The processes that texts are divided over in this block of the program, if they are."""
    return _division


def divide(division: Division | None) -> Division | None:
    """Makes `division` the one in force; returns the one before."""
    global _division
    before, _division = _division, division
    return before


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return _Total.apply(gradient, ctx.group), None


class _All(torch.autograd.Function):
    """[...] of each process -> [processes, ...] in all of them."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return torch.stack(_gathered(tensor, group))

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


class _Neighbours(torch.autograd.Function):
    """[B, K, t, d] of each process -> [B, K, to - from, d]: the tokens of the text that its span names."""

    @staticmethod
    def forward(ctx, tokens, spans, group):
        rank, length = dist.get_rank(group), tokens.shape[2]
        ctx.spans, ctx.group, ctx.length = spans, group, length
        start, stop = spans[rank]
        found = tokens.new_empty(*tokens.shape[:2], stop - start, tokens.shape[3])
        found[:, :, rank * length - start : (rank + 1) * length - start] = tokens
        outgoing, incoming = [], []
        for other in range(len(spans)):
            first, last = _common(spans[other], rank, length)
            if other != rank and first < last:
                outgoing.append((other, tokens[:, :, first - rank * length : last - rank * length].contiguous()))
            first, last = _common(spans[rank], other, length)
            if other != rank and first < last:
                incoming.append((other, slice(first - start, last - start)))
        for where, piece in _exchanged(outgoing, [(other, found[:, :, at], at) for other, at in incoming], group):
            found[:, :, where] = piece
        return found

    @staticmethod
    def backward(ctx, gradient):
        spans, group, length = ctx.spans, ctx.group, ctx.length
        rank = dist.get_rank(group)
        start = spans[rank][0]
        own = gradient[:, :, rank * length - start : (rank + 1) * length - start].clone()
        outgoing, incoming = [], []
        for other in range(len(spans)):  # what came from a process goes back to it
            first, last = _common(spans[rank], other, length)
            if other != rank and first < last:
                outgoing.append((other, gradient[:, :, first - start : last - start].contiguous()))
            first, last = _common(spans[other], rank, length)
            if other != rank and first < last:
                at = slice(first - rank * length, last - rank * length)
                incoming.append((other, own[:, :, at], at))
        for where, piece in _exchanged(outgoing, incoming, group):
            own[:, :, where] += piece
        return own, None, None


def _common(span: Span, owner: int, length: int) -> Span:
    """What of a span stands in the part of process `owner`."""
    return max(span[0], owner * length), min(span[1], (owner + 1) * length)


def _exchanged(
    outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor, slice]], group: Any
) -> list[tuple[slice, Tensor]]:
    """Sends tensors to processes of the group and receives as many as `incoming` has: (process, a tensor of the shape,
    what to call it)."""
    found = [(where, like.new_empty(like.shape)) for _, like, where in incoming]
    peer = (lambda rank: dist.get_global_rank(group, rank)) if group is not None else (lambda rank: rank)
    steps = [dist.P2POp(dist.isend, piece, peer(other), group) for other, piece in outgoing]
    steps += [
        dist.P2POp(dist.irecv, piece, peer(other), group)
        for (other, _, _), (_, piece) in zip(incoming, found, strict=True)
    ]
    for work in dist.batch_isend_irecv(steps) if steps else ():
        work.wait()
    return found


def _gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    tensor = tensor.contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return found


class TextParts:
    """The part of every row that this process holds, among those of all processes of a group.

    Args:
        group: the processes, in the order of the parts; `None`: all.
        length: tokens of a part, t.
        mask: [B, T] of whole rows, True = real token; None where nothing is padding.
        documents: [B, T] numbers of the documents of whole packed rows, or None.
    """

    def __init__(self, group: Any, length: int, mask: Tensor | None = None, documents: Tensor | None = None):
        self.group, self.length, self.mask, self.documents = group, length, mask, documents
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    @property
    def start(self) -> int:
        """The place of this part's first token in its row."""
        return self.rank * self.length

    @property
    def total_length(self) -> int:
        """T: the tokens of a row, padding included."""
        return self.count * self.length

    def own(self, whole: Tensor) -> Tensor:
        """[B, T, ...] -> [B, t, ...]: what belongs to this part."""
        return whole[:, self.start : self.start + self.length]

    @torch.compiler.disable
    def total(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor."""
        return _Total.apply(tensor, self.group)

    @torch.compiler.disable
    def all(self, tensor: Tensor) -> Tensor:
        """Every process's tensor [...], in the order of the parts: [processes, ...]."""
        return _All.apply(tensor, self.group)

    @torch.compiler.disable
    def largest(self, tensor: Tensor) -> Tensor:
        """The maximum of every process's tensor, without a gradient."""
        top = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        return top

    @torch.compiler.disable
    def spread(self, tokens: Tensor, spans: Sequence[Span]) -> Tensor:
        """tokens [B, K, t, d] of this part -> [B, K, n, d], those that stand in the span (first, behind the last) of
        this process. spans: of all processes, each with its own part inside, so that every process knows what others
        need of it."""
        return _Neighbours.apply(tokens, tuple(spans), self.group)

    @torch.compiler.disable
    def before(self, states: Tensor, most: int) -> Tensor:
        """states [B, t, D] of this part -> [B, n, D], those of the last `most` tokens before it (all, where there are
        fewer), however many parts hold them, without a gradient."""
        spans = [(max(rank * self.length - most, 0), (rank + 1) * self.length) for rank in range(self.count)]
        with torch.no_grad():
            found = _Neighbours.apply(states.detach()[:, None], tuple(spans), self.group)
        return found[:, 0, : self.start - spans[self.rank][0]]

    def chosen(self, tokens: Tensor, places: Tensor) -> Tensor:
        """tokens [B, K, t, d] of this part, places [B, n] in whole rows -> [B, K, n, d], in all processes."""
        inside = (places >= self.start) & (places < self.start + self.length)
        index = (places - self.start).clamp(0, self.length - 1)[:, None, :, None]
        own = tokens.gather(2, index.expand(-1, tokens.shape[1], -1, tokens.shape[3]))
        return self.total(own.masked_fill(~inside[:, None, :, None], 0.0))


def check_alike(numbers: Sequence[int], group: Any, device: torch.device, refusal: str) -> None:
    """Refuses, in all processes, numbers that are not the same in all of them.

    Raises:
        ValueError: `refusal`, followed by what the processes have.
    """
    found = [tuple(each.tolist()) for each in _gathered(torch.tensor(numbers, device=device), group)]
    if len(set(found)) > 1:
        raise ValueError(f"{refusal}, got {' and '.join(str(list(each)) for each in found)}.")


@torch.compiler.disable
def whole_rows(part: Tensor, group: Any) -> Tensor:
    """[B, t] of each process -> [B, T] in all of them, without a gradient."""
    return torch.cat(_gathered(part.detach(), group), dim=1)
