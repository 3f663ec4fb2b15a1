# SPDX-License-Identifier: Apache-2.0
"""PowerNorm: division by a running quadratic mean over tokens, with a running estimate in the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.distributed import num_processes, sum_over_processes
from ..core.weight_decay import Undecayed
from ..ops.common.derivatives import first_derivative_only
from .base import NormSpec


class _RunningPower(torch.autograd.Function):
    """The forward and the approximate backward pass of a training step (Shen et al. 2020, Algorithm 2).

    The running statistics move in the backward pass: once for each training step that happens, also where activation
    checkpointing runs the forward pass twice, and both runs then read the same statistics. They are those of the
    tokens of all processes; nu is that of the mean of the processes' losses, whose gradients data parallelism
    averages.
    """

    @staticmethod
    def forward(ctx, vectors, real, weight, bias, psi2, nu, steps, settings):
        _, _, warmup, eps = settings
        sums = vectors.square().masked_fill(~real[:, None], 0.0).sum(0)
        totals = sum_over_processes(torch.cat([sums, real.sum()[None].to(sums.dtype)]))
        count = totals[-1]
        square = totals[:-1] / count.clamp(min=1)
        warming = steps < warmup
        root = torch.rsqrt(torch.where(warming, square, psi2.to(square.dtype)) + eps)
        normal = vectors * root
        ctx.save_for_backward(normal, root, weight, real, square, count)
        ctx.state, ctx.settings = (psi2, nu, steps), settings  # not saved tensors: they change before the next step
        return normal * weight.to(normal.dtype) + bias.to(normal.dtype)

    @staticmethod
    @first_derivative_only("PowerNorm, whose gradient is not that of its output,")
    def backward(ctx, gradient):
        normal, root, weight, real, square, count = ctx.saved_tensors
        psi2, nu, steps = ctx.state
        alpha_fwd, alpha_bwd, warmup, _ = ctx.settings
        inner = gradient * weight.to(gradient.dtype)
        # A padded token has no part in the loss, and the running term must not give it one.
        world = num_processes()
        to_vectors = ((inner - world * nu.to(inner.dtype) * normal) * root).masked_fill(~real[:, None], 0.0)
        to_weight = (gradient * normal).sum(0).to(weight.dtype)
        to_bias = gradient.sum(0).to(weight.dtype)

        shown = normal.masked_fill(~real[:, None], 0.0)
        sums = torch.stack([shown.square().sum(0), (inner * shown).sum(0) / world])
        spread, slope = sum_over_processes(sums) / count.clamp(min=1)
        new_nu = nu * (1 - (1 - alpha_bwd) * spread) + (1 - alpha_bwd) * slope
        mean = psi2 + (square - psi2) / (steps + 1)
        new_psi2 = torch.where(steps < warmup, mean, alpha_fwd * psi2 + (1 - alpha_fwd) * square)
        counts = (count > 0) & new_nu.isfinite().all()  # a step that overflowed is skipped, as the optimizer skips it
        nu.copy_(torch.where(counts, new_nu.to(nu.dtype), nu))
        psi2.copy_(torch.where(counts, new_psi2.to(psi2.dtype), psi2))
        steps += counts
        return to_vectors, None, to_weight, to_bias, None, None, None, None


class PowerNorm(Undecayed, nn.Module):
    """y = g x / sqrt(psi^2 + eps) + b per channel, psi^2 a running mean of x^2 over real tokens.

    Shen et al. 2020 (arXiv 2003.07845), section 4. A training step divides by the psi of the steps before it, and its
    backward pass replaces what the exact derivative of a batch statistic would need by a running estimate nu:
    dx = (g dy - nu x / psi) / psi. In the first `warmup_iters` steps the batch's own mean square is used, and psi^2 is
    the mean over all steps so far. Evaluation uses the running psi, and a token's output depends on nothing else; so
    does a frozen norm (its weight needs no gradient, as next to adapters), which keeps its statistics.
    """

    undecayed = ("weight", "bias")
    running_square: Tensor
    running_gradient: Tensor
    steps: Tensor

    def __init__(self, width: int, spec: PowerNormSpec, eps: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_square", torch.ones(width))
        self.register_buffer("running_gradient", torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.group_num, self.eps = spec.group_num, eps
        self.settings = (float(spec.alpha_fwd), float(spec.alpha_bwd), spec.warmup_iters, eps)

    def initialize(self, config, init) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)
        init.ones_(self.running_square)
        init.zeros_(self.running_gradient)
        init.zeros_(self.steps)

    def scale_groups(self, vectors: Tensor) -> Tensor:
        """Each token's channels, in `group_num` groups, divided by their quadratic mean (the released code)."""
        if self.group_num is None:
            return vectors
        groups = vectors.unflatten(-1, (self.group_num, -1))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """hidden_states [..., D], mask [...] boolean (True = real; None: all are) -> [..., D]."""
        wide = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()
        vectors = self.scale_groups(wide)
        if self.training and self.weight.requires_grad:
            flat = vectors.reshape(-1, vectors.shape[-1])
            real = flat.new_ones(flat.shape[0], dtype=torch.bool) if mask is None else mask.reshape(-1)
            output = self.train_step(flat, real).view_as(vectors)
        else:
            root = torch.rsqrt(self.running_square.to(wide.dtype) + self.eps)
            output = vectors * (root * self.weight) + self.bias
        return output.to(hidden_states.dtype)

    @torch.compiler.disable
    def train_step(self, vectors: Tensor, real: Tensor) -> Tensor:
        """vectors [N, D], real [N] -> [N, D]; apart from a compiled graph, which cannot hold a backward pass that
        counts."""
        return _RunningPower.apply(
            vectors,
            real,
            self.weight,
            self.bias,
            self.running_square,
            self.running_gradient,
            self.steps,
            self.settings,
        )


@register("normalization", "power_norm")
class PowerNormSpec(NormSpec):
    """
    Args:
        alpha_fwd, alpha_bwd: decay of the running mean square and of the running gradient statistic.
        warmup_iters: training steps with the batch's own statistic.
        group_num: groups of channels that each token is scaled in first (the released code: 1; None: not at all, as in
            the paper's equations).

    eps: the config's `layer_norm_eps`.
    """

    summary = "a running quadratic mean over tokens, no mean"
    over_tokens = True
    tensor_parallel = False  # its sums over processes are those of data parallelism

    alpha_fwd: float = bounded(0.9, above=0, below=1)
    alpha_bwd: float = bounded(0.9, above=0, below=1)
    warmup_iters: int = bounded(10_000, least=0)
    group_num: int | None = 1

    def check(self, config) -> None:
        if self.group_num is not None and (self.group_num < 1 or config.hidden_size % self.group_num):
            raise ValueError(
                f"power_norm: `group_num` {self.group_num} must divide `hidden_size` {config.hidden_size} (None: no"
                " groups)."
            )
        places = (
            ("embedding `normalize`", config.embedding.normalizes()),
            ("residual `final_dropout`", isinstance(config.residual.build_final(config), nn.Sequential)),
            (f"head {config.head.type!r}", config.head.normalizes),
            ("`classifier_transform` 'dense_norm'", config.classifier_transform == "dense_norm"),
        )
        for place, taken in places:
            if taken:
                raise ValueError(
                    f"power_norm takes its statistics over real tokens, which {place} does not tell apart; leave that"
                    " out."
                )

    def build(self, config, **where) -> PowerNorm:
        return PowerNorm(where.get("width", config.hidden_size), self, config.layer_norm_eps)
