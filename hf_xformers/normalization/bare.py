# SPDX-License-Identifier: Apache-2.0
"""A residual sum without normalization, for sublayers that normalize inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.components import register
from .residual import Residual, ResidualSpec, final_norm


class BareSum(Residual):
    """y = x + f(x)."""

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return hidden_states + self.branch(output, gate)


@register("residual", "bare")
class BareSpec(ResidualSpec):
    """final_norm: normalize the residual stream after the last layer."""

    supports = frozenset({"context_parallel"})
    summary = "a plain residual sum, for sublayers that normalize by themselves"
    module = BareSum
    additive = True
    enters_as_is = True

    final_norm: bool = True

    def build_final(self, config) -> nn.Module | None:
        return final_norm(config) if self.final_norm else None
