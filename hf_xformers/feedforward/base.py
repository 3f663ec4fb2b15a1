# SPDX-License-Identifier: Apache-2.0
"""The feed-forward contract."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..core.call import Call, Sublayer, SublayerOutput
from ..core.components import Spec


class FeedForward(Sublayer):
    """Base of feed-forward modules: functions of single tokens, up to what they count over a batch."""

    def forward(self, hidden_states: Tensor, context: Call) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D]."""
        raise NotImplementedError


class FeedForwardSpec(Spec):
    """Base of feed-forward specs, whose `build` gives a [`FeedForward`].

    gated: whether a second projection, `gate_proj`, gates the first.
    """

    gated: ClassVar[bool] = False

    def expert_parameters(self) -> tuple[str, ...]:
        """Names of the parameters [E, ...] of its module `experts`, which stack experts; none where it has none."""
        return ()

    def expert_count(self) -> int:
        """E; 0 where it has no experts."""
        return 0
