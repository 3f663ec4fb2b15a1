"""Sums over all processes of a training run, for statistics that must be those of the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def num_processes() -> int:
    """Processes of the default group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return _Sum.apply(gradient)


@torch.compiler.disable
def _sum(tensor: Tensor) -> Tensor:
    return _Sum.apply(tensor)


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of every process's `tensor`, of one shape in all; `tensor` itself in a single process.

    All processes of the default group must come here, as in a batch norm that is synchronised. The gradient is that of
    the sum of all processes' losses, which is what data parallelism averages.
    """
    return tensor if num_processes() == 1 else _sum(tensor)


__all__ = ["num_processes", "sum_over_processes"]
