# SPDX-License-Identifier: Apache-2.0
"""ReZero: a learned gate that starts at zero in place of any normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.components import register
from ..core.reading_weights import weight_of
from .residual import Residual, ResidualSpec


class ReZero(Residual):
    """y = x + alpha f(x), alpha a scalar that starts at 0, no norm (Bachlechner et al. 2020, arXiv 2003.04887, eq. 1).

    A layer's frames share one alpha, as in the authors' code, unless `shared=False`.
    """

    undecayed = ("alpha",)
    _owner: Any  # the frame that has the parameter

    def __init__(self, config, scale: float = 1.0, owner: ReZero | None = None):
        super().__init__(config, scale)
        self.start = float(config.residual.init)
        self.alpha = nn.Parameter(torch.full((1,), self.start)) if owner is None else None
        # Outside the module tree: the owner registers the parameter, once.
        object.__setattr__(self, "_owner", self if owner is None else owner)

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return hidden_states + weight_of(self._owner, "alpha") * self.branch(output, gate)

    def initialize(self, config, init) -> None:
        if self.alpha is not None:
            init.constant_(self.alpha, self.start)


@register("residual", "rezero")
class ReZeroSpec(ResidualSpec):
    """init: alpha at the start. shared: one alpha for all sublayers of a layer."""

    supports = frozenset({"context_parallel"})
    summary = "a learned scalar gate that starts at zero, no norm"
    module = ReZero
    additive = True
    enters_as_is = True

    init: float | int = 0.0
    shared: bool = True

    def build(self, config, **where) -> ReZero:
        siblings = where.get("siblings") or []
        owner = siblings[0] if self.shared and siblings else None
        return ReZero(config, scale=where.get("scale", 1.0), owner=owner)
