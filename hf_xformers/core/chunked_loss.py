# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy and divergence of logits over large vocabularies, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops.common.derivatives import first_derivative_only

_NUMBERS_AT_ONCE = {"cpu": 1 << 20}  # of logits in float32: what a cache holds; elsewhere a step costs more than room
_NUMBERS_ELSEWHERE = 1 << 26
_LARGE = 1 << 24  # numbers in float32 that are worth it


def _pieces(logits: Tensor) -> Iterator[tuple[int | slice, slice]]:
    """Where some rows of logits [B, T, V] stand: of all batches, or of one after the other."""
    batch, length, vocab = logits.shape
    rows = max(1, _NUMBERS_AT_ONCE.get(logits.device.type, _NUMBERS_ELSEWHERE) // max(vocab, 1))
    if batch * length <= rows:
        yield slice(None), slice(None)
        return
    for index in range(batch):
        for start in range(0, length, rows):
            yield index, slice(start, start + rows)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over labels [B, T] (`ignore_index`: none) of the cross-entropy of logits [B, T, V], in float32.

    No further copy of all logits is made: next to them there is their gradient, in their own type, made in the forward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        total = logits.new_zeros((), dtype=torch.float32)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for where in _pieces(logits):
            some, target = logits[where].float(), labels[where]
            known = target != ignore_index
            target = target.masked_fill(~known, 0)[..., None]
            weight, norm = known[..., None].float(), some.logsumexp(-1, keepdim=True)
            total += ((norm - some.gather(-1, target)) * weight).sum()
            if grad is not None:
                slope = (some - norm).exp_().mul_(weight)  # `some` is the logits themselves where these are in float32
                grad[where] = slope.scatter_add_(-1, target, -weight)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @first_derivative_only("Cross-entropy of many logits", "give no labels, and compute the loss from the logits")
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return _scaled(grad, grad_total), None, None


class ChunkedDivergence(torch.autograd.Function):
    """The sum over `chosen` [B, T] (boolean) of KL(softmax(teacher / t) || softmax(student / t)) in nats, in float32:
    student, teacher [B, T, V], temperature t. Only the student has a gradient."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, chosen: Tensor, temperature: float) -> Tensor:
        total = student.new_zeros((), dtype=torch.float32)
        grad = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for where in _pieces(student):
            weight = chosen[where][..., None].float()
            own, taught = ((logits[where].float() / temperature).log_softmax(-1) for logits in (student, teacher))
            likely = taught.exp()
            total += (taught.sub_(own).mul_(likely) * weight).sum()
            if grad is not None:
                grad[where] = own.exp_().sub_(likely).mul_(weight / temperature)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @first_derivative_only("The divergence of many logits", "compute it from the logits")
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return _scaled(grad, grad_total), None, None, None


def divergence_of_chosen(student: Tensor, teacher: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """[`ChunkedDivergence`] that looks at nothing but the tokens `chosen` where these are few, as of a masked language
    model."""
    if 2 * int(chosen.sum()) < chosen.numel():
        student, teacher = (logits[chosen][None] for logits in (student, teacher))
        chosen = torch.ones(student.shape[:2], dtype=torch.bool, device=student.device)
    total: Tensor = ChunkedDivergence.apply(student, teacher, chosen, temperature)
    return total


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """`grad` times a factor that, often one by many tokens, has too few digits in half precision."""
    scaled = torch.empty_like(grad)
    for where in _pieces(grad):
        scaled[where] = grad[where].float() * factor
    return scaled


def takes_chunks(logits: Tensor) -> bool:
    """Whether logits gain by it: of half precision, or so many that copies of them take the memory, outside of a
    graph, whose kernels hold no copies either."""
    if torch.compiler.is_compiling():
        return False
    half = logits.dtype in (torch.bfloat16, torch.float16)
    return half or (logits.dtype == torch.float32 and logits.numel() > _LARGE)
