# SPDX-License-Identifier: Apache-2.0
"""The plain stack."""

from __future__ import annotations

from ..core.components import register
from .base import Stack, StackSpec
from .driver import Pass, StackOutput


class PlainStack(Stack):
    """Every layer once, in order."""

    def forward(self, run: Pass) -> StackOutput:
        run.begin()
        for step in range(len(run.layers)):
            run.step(step)
        return run.output()


@register("stack", "plain")
class PlainStackSpec(StackSpec):
    """Layers one after the other (Vaswani et al. 2017)."""

    packed = True
    tells_earlier_ids = True
    context_parallel = True
    passes_log_probs = True
    drops_layers = True
    summary = "layers one after the other"
    unpads = True

    def build(self, config, **where) -> PlainStack:
        return PlainStack()
