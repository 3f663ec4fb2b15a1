# SPDX-License-Identifier: Apache-2.0
"""Admin: post-LN whose shortcuts start with a weight that keeps deep stacks stable."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.call import Call
from ..core.components import register
from ..core.evaluating import evaluating
from ..core.reading_weights import weight_of
from .residual import PostNorm, ResidualSpec


class Admin(PostNorm):
    """x_i = LN(x_{i-1} * omega_i + f_i(x_{i-1})), omega_i in R^D learned (Liu et al. 2020, arXiv 2004.08249, section
    4.2).

    How omega starts decides how far a change of all parameters moves the output of n sublayers; see [`AdminSpec`].
    """

    undecayed = ("omega",)
    profiled: Tensor

    def __init__(self, config, scale: float = 1.0, start: float = 1.0, profiled: bool = True):
        super().__init__(config, scale)
        self.start = start
        self.omega = nn.Parameter(torch.full((config.hidden_size,), start))
        # Saved: a model whose start needs data says whether it has seen some.
        self.register_buffer("profiled", torch.tensor(int(profiled)))
        self.needs_profile = not profiled
        self._trace: _Trace | None = None

    def initialize(self, config, init) -> None:
        init.constant_(self.omega, self.start)
        init.constant_(self.profiled, int(not self.needs_profile))

    def inputs(self, context: Call) -> dict[str, Any]:
        given = super().inputs(context)
        return given if self._trace is None else {**given, "mask": context.query_padding_mask}

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        branch = self.branch(output, gate)
        if self._trace is not None:
            self._trace.visit(self, hidden_states, branch, inputs.pop("mask"))
        elif self.training and self.needs_profile and not torch.compiler.is_compiling():
            if not bool(self.profiled):  # asked until it is answered: no wait for the device later on
                raise ValueError(
                    "residual 'admin' with `start='profile'` takes its start from data: call "
                    "`hf_xformers.normalization.admin.profile(model, **batch)` once before training."
                )
            self.needs_profile = False
        return self.norm(hidden_states * weight_of(self, "omega") + branch, **inputs)


class _Trace:
    """Variance of the residual stream of one tower, sublayer after sublayer."""

    def __init__(self) -> None:
        self.variance: Tensor | None = None

    def visit(self, frame: Admin, shortcut: Tensor, branch: Tensor, mask: Tensor | None) -> None:
        omega = (
            torch.ones_like(frame.omega[0]) if self.variance is None else self.variance.sqrt().to(frame.omega.dtype)
        )
        frame.omega.copy_(omega.expand_as(frame.omega))
        frame.profiled.fill_(1)
        parts = [shortcut * frame.omega, branch]
        if mask is not None:
            parts = [part[mask] for part in parts]
        self.variance = torch.stack([part.double().var(correction=0) for part in parts]).sum()


@torch.no_grad()
def profile(model: nn.Module, **batch: Any) -> None:
    """Starts every omega of `model` from one forward pass over `batch` (its keyword arguments), without dropout.

    omega_1 = 1 and omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var(f_i(x_{i-1})), over all numbers of all real tokens, for
    each tower by itself (Liu et al. 2020, section 4.2 and released code). Under data parallelism call it in one
    process, or with the same batch in all, before the model is wrapped.

    Raises:
        ValueError: the model has no residual 'admin'.
    """
    # A tower is a model inside the model. Those around it come before it, so that the innermost traces its frames.
    towers = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    frames = [[part for part in tower.modules() if isinstance(part, Admin)] for tower in towers]
    if not any(frames):
        raise ValueError("`profile` starts the shortcuts of residual 'admin', which this model does not have.")
    try:
        for own in frames:
            trace = _Trace()
            for frame in own:
                frame._trace = trace
        with evaluating(model):
            model(**batch)
    finally:
        for frame in (frame for own in frames for frame in own):
            frame._trace = None


@register("residual", "admin")
class AdminSpec(ResidualSpec):
    """start: omega^2 at the start, for n sublayers in the tower: `logn` (n + 1) / ln(n + 1) - 1, so that the output
    moves by O(log n) when all parameters move (the authors' later form, which needs no data); `constant` n, O(1);
    `linear` 1, O(n), which is post-LN; `profile` the paper's form, taken from a batch by [`profile`]."""

    summary = "post-norm with learned weights on the shortcuts"
    module = Admin
    enters_as_is = True

    start: Literal["logn", "constant", "linear", "profile"] = "logn"

    def start_value(self, config) -> float:
        """omega at the start for one tower's config."""
        cross = config.is_encoder_decoder and config.is_decoder
        sublayers = sum(len(config.block.plan(config, index, cross)) for index in range(config.num_hidden_layers))
        if self.start == "logn":
            return math.sqrt((sublayers + 1) / math.log(sublayers + 1) - 1) if sublayers else 1.0
        return math.sqrt(sublayers) if self.start == "constant" else 1.0

    def build(self, config, **where) -> Admin:
        return Admin(config, where.get("scale", 1.0), self.start_value(config), profiled=self.start != "profile")
