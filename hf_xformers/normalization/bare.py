# SPDX-License-Identifier: Apache-2.0
"""A residual sum without normalization, for sublayers that normalize inside."""

from __future__ import annotations

from torch import nn

from ..core.components import register
from .residual import PlainSum, ResidualSpec, final_norm


@register("residual", "bare")
class BareSpec(ResidualSpec):
    """final_norm: normalize the residual stream after the last layer."""

    supports = frozenset({"context_parallel"})
    summary = "a plain residual sum, for sublayers that normalize by themselves"
    module = PlainSum
    additive = True
    enters_as_is = True

    final_norm: bool = True

    def build_final(self, config) -> nn.Module | None:
        return final_norm(config) if self.final_norm else None
