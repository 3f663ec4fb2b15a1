# SPDX-License-Identifier: Apache-2.0
"""Sums over all processes of a training run, for statistics that must be those of the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def num_processes() -> int:
    """Processes of the default group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_number() -> int:
    """This process's number in the default group; 0 where there is none."""
    return dist.get_rank() if num_processes() > 1 else 0


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

    All processes of the default group must come here, as in a batch norm that is synchronized. The gradient is that of
    the sum of all processes' losses, which is what data parallelism averages.
    """
    return tensor if num_processes() == 1 else _sum(tensor)


def rows_of_processes(rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor, int]:
    """All processes' rows [N, D] with there [N] boolean, whose number may differ between processes, one process after
    the other: [M, D], [M], and the number of this one's first. The gradient is that of [`sum_over_processes`]."""
    world = num_processes()
    if world == 1:
        return rows, there, 0
    most = torch.tensor(rows.shape[0], device=rows.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    size, rank = int(most), dist.get_rank()
    before, after = rank * size, (world - rank) * size - rows.shape[0]
    both = torch.cat([rows, there[:, None].to(rows.dtype)], dim=1)
    found = sum_over_processes(torch.nn.functional.pad(both, (0, 0, before, after)))
    return found[:, :-1], found[:, -1] > 0, before
