# SPDX-License-Identifier: Apache-2.0
"""Feed-forward of complex states: the same network on real and imaginary parts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..core.call import Call, SublayerOutput
from ..core.components import build_spec, register
from .base import FeedForward, FeedForwardSpec
from .dense import DenseFeedForwardSpec


class PartsFeedForward(FeedForward):
    """One position-wise network of half the width, applied to each part (Wang et al. 2020, arXiv 1912.12333, released
    code); `intermediate_size` counts the units of both."""

    def __init__(self, config, spec: PartsFeedForwardSpec):
        super().__init__()
        half = copy.copy(config)
        half.hidden_size, half.intermediate_size = config.hidden_size // 2, config.intermediate_size // 2
        self.inner = build_spec("feedforward", spec.inner).build(half)

    def forward(self, hidden_states: Tensor, context: Call) -> SublayerOutput:
        real, imaginary = [self.inner(part, context).output for part in hidden_states.chunk(2, dim=-1)]
        return SublayerOutput(torch.cat((real, imaginary), dim=-1))


@register("feedforward", "complex_parts")
class PartsFeedForwardSpec(FeedForwardSpec):
    """inner: name of the dense feed-forward that each part goes through."""

    summary = "one feed-forward on real and imaginary parts each"

    inner: str = "relu"

    def check_fields(self) -> None:
        if not isinstance(build_spec("feedforward", self.inner), DenseFeedForwardSpec):
            raise ValueError(
                f"complex_parts needs a dense feed-forward under `inner`, e.g. 'relu', got {self.inner!r}."
            )

    def check(self, config) -> None:
        if config.hidden_size % 2 or config.intermediate_size < 2:
            raise ValueError(
                f"complex_parts needs an even `hidden_size` and `intermediate_size` >= 2, got {config.hidden_size} and"
                f" {config.intermediate_size}."
            )

    def build(self, config, **where) -> PartsFeedForward:
        return PartsFeedForward(config, self)
