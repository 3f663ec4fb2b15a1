"""Cross-entropy of half-precision logits over large vocabularies, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops.common.derivatives import first_derivative_only

_NUMBERS_AT_ONCE = {"cpu": 1 << 20}  # of logits in float32: what a cache holds; elsewhere a step costs more than room
_NUMBERS_ELSEWHERE = 1 << 26


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

    No copy of all logits in float32 is made: beside them there is their gradient, in their own type, made in the
    forward pass.
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
                slope = some.sub_(norm).exp_().mul_(weight)
                grad[where] = slope.scatter_add_(-1, target, -weight)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @first_derivative_only("Cross-entropy of half-precision logits", "compute the logits in float32")
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        scaled = torch.empty_like(grad)
        for where in _pieces(grad):  # the factor, often one by many tokens, has too few digits in half precision
            scaled[where] = grad[where].float().mul_(grad_total)
        return scaled, None, None


def takes_chunks(logits: Tensor) -> bool:
    """Whether logits gain by it: of half precision, outside of a graph, whose kernels hold no copies either."""
    return logits.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling()


__all__ = ["ChunkedCrossEntropy", "takes_chunks"]
