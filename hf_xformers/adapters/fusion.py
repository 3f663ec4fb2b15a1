# SPDX-License-Identifier: Apache-2.0
"""AdapterFusion (Pfeiffer et al. 2021, arXiv 2005.00247, section 3.2): attention over the outputs of several trained
adapters, in each layer and for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class FusionConfig:
    """Settings of a fusion.

    adapters: the adapters to fuse, two or more: names of those that a model has, or folders that save_adapter wrote.

    Raises ValueError for fewer than two adapters, and for one that is named twice.
    """

    adapters: list[str] = field(default_factory=list)
    kind: str = "fusion"

    def __post_init__(self) -> None:
        if len(self.adapters) < 2:
            raise ValueError(
                f"a fusion weighs adapters against each other, and {self.adapters} are fewer than two; name more"
                " trained ones, or load the one by itself"
            )
        if len(set(self.adapters)) < len(self.adapters):
            raise ValueError(f"a fusion is given an adapter twice in {self.adapters}; name each once")

    @property
    def trains_norms(self) -> bool:
        return False


class Fusion(nn.Module):
    """o = sum_n softmax_n((W_q h)^T (W_k a_n)) W_v a_n over the outputs a_n of the adapters for a state h (equation 4
    of section 3.2). W_v begins as the identity, so that equal adapters are one."""

    def __init__(self, hidden_size: int, members: Sequence[str]):
        super().__init__()
        self.members = tuple(members)
        self.query, self.key = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=INIT_STD)
            nn.init.zeros_(linear.bias)
        nn.init.eye_(self.value.weight)

    def forward(self, hidden_states: Tensor, adapters: nn.ModuleDict) -> Tensor:
        """[..., D] -> [..., D], what the adapters together add."""
        outputs = torch.stack([adapters[name](hidden_states) for name in self.members], dim=-2)  # [..., N, D]
        scores = (self.query(hidden_states).unsqueeze(-2) * self.key(outputs)).float().sum(-1)
        weights = scores.softmax(-1).to(outputs.dtype)
        return (weights.unsqueeze(-1) * self.value(outputs)).sum(-2)


def check_members(configs: dict[str, Any], members: Sequence[str]) -> None:
    """Refuses what cannot be fused: unknown adapters, and those that change more than what they add."""
    for name in members:
        found = configs.get(name)
        if found is None:
            raise ValueError(
                f"there is no adapter {name!r} to fuse, neither in the model ({', '.join(configs) or 'none'}) nor as a"
                " folder that save_adapter wrote; load it first"
            )
        if found.kind != "pfeiffer" or found.trains_norms:
            what = f"kind {found.kind!r}" if found.kind != "pfeiffer" else "norms of its own"
            raise ValueError(
                f"a fusion reads what adapters add after the feed-forward of layers that are the same for all, and"
                f" {name!r} has {what}; train it with kind 'pfeiffer' and the norms left alone"
            )
