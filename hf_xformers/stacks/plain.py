# SPDX-License-Identifier: Apache-2.0
"""The plain stack."""

from __future__ import annotations

from ..core.components import register
from ..core.hand_overs import HandOver
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

    supports = frozenset({"choices", "context_parallel", "layer_drop", "packed_rows", "unpadding"})
    gives = frozenset({HandOver.EARLIER_IDS})
    summary = "layers one after the other"

    def build(self, config, **where) -> PlainStack:
        return PlainStack()
