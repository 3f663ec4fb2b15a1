# SPDX-License-Identifier: Apache-2.0
"""A gated linear unit as a sublayer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call, Sublayer, SublayerOutput


class GatedLinear(Sublayer):
    """(x W_a) * sigmoid(x W_b), each with a bias, of one width (Dauphin et al. 2017, arXiv 1612.08083)."""

    def __init__(self, width: int):
        super().__init__()
        self.up_proj, self.gate_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, context: Call, **given: Any) -> SublayerOutput:
        return SublayerOutput(self.up_proj(hidden_states) * torch.sigmoid(self.gate_proj(hidden_states)))
