# SPDX-License-Identifier: Apache-2.0
"""A frame without a residual sum: what a sublayer gives takes the place of what it read."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from ..core.components import register
from ..core.hand_overs import HandOver
from .base import NormSpec, norm_inputs
from .residual import Residual, ResidualSpec

_ACTIVATIONS = {"relu": F.relu, "leaky_relu": F.leaky_relu, "none": None}


class NoResidual(Residual):
    """y = LN(ReLU(f(x))) (Guo et al. 2019, arXiv 1902.09113, section 3.2.1)."""

    keeps_stream = False

    def __init__(self, config, scale: float = 1.0):
        super().__init__(config, scale)
        self.activation = _ACTIVATIONS[config.residual.activation]
        self.normalization: NormSpec = config.normalization
        self.norm = config.normalization.build(config) if config.residual.norm else None

    def inputs(self, context: Any) -> dict[str, Any]:
        return norm_inputs(self.normalization, context)

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        output = self.branch(output, gate)
        output = output if self.activation is None else self.activation(output)
        return output if self.norm is None else self.norm(output, **inputs)


@register("residual", "no_residual")
class NoResidualSpec(ResidualSpec):
    """activation: of what the sublayer gives; the released code of Star-Transformer has leaky_relu. norm: whether the
    result is normalized."""

    supports = frozenset({"context_parallel"})
    summary = "no residual sum: an activation and a norm of what a sublayer gives"
    module = NoResidual
    enters_as_is = True

    activation: Literal["relu", "leaky_relu", "none"] = "relu"
    norm: bool = True

    @property
    def gives(self) -> frozenset[HandOver]:  # type: ignore[override]
        return frozenset({HandOver.TOKEN_MAP} if self.activation != "none" else ())
