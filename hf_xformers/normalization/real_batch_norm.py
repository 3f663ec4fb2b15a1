# SPDX-License-Identifier: Apache-2.0
"""Batch normalization whose statistics are those of real tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.distributed import sum_over_processes
from ..core.weight_decay import Undecayed


class _Moving(torch.autograd.Function):
    """The identity on a training step's output; its backward pass moves the running statistics.

    So they move once for each training step that happens, also where activation checkpointing runs the forward pass
    twice.
    """

    @staticmethod
    def forward(ctx, output, mean, variance, count, running_mean, running_variance, momentum):
        ctx.found, ctx.momentum = (mean, variance, count), momentum
        ctx.running = (running_mean, running_variance)  # not saved tensors: they change before the next step
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        mean, variance, count = ctx.found
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in zip(ctx.running, (mean, unbiased), strict=True):
            moved = torch.lerp(running.to(new.dtype), new, ctx.momentum)
            # A batch of padding alone says nothing, and a step that overflowed is skipped by the optimizer, too.
            running.copy_(torch.where((count > 0) & moved.isfinite().all(), moved.to(running.dtype), running))
        return gradient, None, None, None, None, None, None


class RealBatchNorm(Undecayed, nn.Module):
    """y = g (x - mean) / sqrt(var + eps) + b per channel (Ioffe & Szegedy 2015, arXiv 1502.03167, Algorithms 1 and 2).

    In training mean and variance are those of the real tokens of the batch, in all processes; evaluation takes their
    running means (`momentum` is the part of the newest step, its variance with n - 1), and so does a frozen norm,
    whose weight needs no gradient, as next to adapters. A batch without padding gives what `torch.nn.BatchNorm1d`
    does. The names are those of that module.
    """

    undecayed = ("weight", "bias")
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float, momentum: float = 0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.eps, self.momentum = eps, momentum

    def initialize(self, config, init) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)
        init.zeros_(self.running_mean)
        init.ones_(self.running_var)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """hidden_states [..., D], mask [...] boolean (True = real; None: all are) -> [..., D]."""
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        if self.training and self.weight.requires_grad:
            flat = wide.reshape(-1, wide.shape[-1])
            real = flat.new_ones(flat.shape[0], dtype=torch.bool) if mask is None else mask.reshape(-1)
            normal = self.train_step(flat, real).view_as(wide)
        else:
            root = torch.rsqrt(self.running_var.to(wide.dtype) + self.eps)
            normal = (wide - self.running_mean.to(wide.dtype)) * root
        return (normal * self.weight.to(wide.dtype) + self.bias.to(wide.dtype)).to(hidden_states.dtype)

    @torch.compiler.disable
    def train_step(self, vectors: Tensor, real: Tensor) -> Tensor:
        """vectors [N, D], real [N] -> [N, D] of mean 0 and variance 1; apart from a compiled graph, which cannot hold
        a backward pass that moves something."""
        known = real[:, None]
        sums = vectors.masked_fill(~known, 0.0).sum(0)
        totals = sum_over_processes(torch.cat([sums, real.sum()[None].to(sums.dtype)]))
        count = totals[-1].detach()
        mean = totals[:-1] / count.clamp(min=1)
        centred = vectors - mean
        variance = sum_over_processes(centred.masked_fill(~known, 0.0).square().sum(0)) / count.clamp(min=1)
        output = centred * torch.rsqrt(variance + self.eps)
        if not torch.is_grad_enabled():
            return output
        found = (mean.detach(), variance.detach(), count)
        return _Moving.apply(output, *found, self.running_mean, self.running_var, self.momentum)
