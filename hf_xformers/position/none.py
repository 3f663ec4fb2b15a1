# SPDX-License-Identifier: Apache-2.0
"""No position at all."""

from __future__ import annotations

from ..core.components import register
from .base import Position, PositionSpec


@register("position", "none", aliases=("nope", "nope_decoder"))
class NoPositionSpec(PositionSpec):
    """Nothing is added. A causal decoder can still tell positions apart by what each token may see (Haviv et al. 2022,
    arXiv 2203.16634); an encoder becomes equivariant to permutations."""

    supports = frozenset({"context_parallel"})
    summary = "no position information"

    def build(self, config, **where) -> Position:
        return Position()
