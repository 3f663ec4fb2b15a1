# SPDX-License-Identifier: Apache-2.0
"""MobileBERT: feature maps and attention of every layer, and predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.components import bounded
from ..layer_maps import uniform
from .base import DistillationMethod, Pass, register, state_error, weight_divergence, widths


@register("mobilebert")
class MobileBert(DistillationMethod):
    """sum_l MSE(H_S, H_T) + KL(A_T || A_S) over layers, with a L_task + (1 - a) t^2 KL(p_T || p_S) (Sun et al. 2020,
    arXiv 2004.02984, section 3.4, all at once: its auxiliary knowledge transfer).

    Args:
        feature_weight, attention_weight: of the two sums.
        alpha: a.
        temperature: of predictions.
    """

    summary = "feature maps and attention of every layer, and predictions"
    reads_states = True
    attention = ("weights",)
    feature_weight: float | int = bounded(1.0, least=0)
    attention_weight: float | int = bounded(1.0, least=0)
    alpha: float | int = bounded(0.5, least=0, most=1)
    temperature: float | int = bounded(1.0, above=0)

    def task_share(self, progress: float) -> float:
        return float(self.alpha)

    def layers(self, student: int, teacher: int) -> dict[int, int]:
        return {mine: other - 1 for mine, other in enumerate(uniform(student, teacher))}

    def projections(self, student: Any, teacher: Any) -> dict[str, tuple[int, int]]:
        return widths("features", student, teacher)

    def terms(self, seen: Pass) -> dict[str, Tensor]:
        own, taught = seen.states()
        pairs = list(enumerate(uniform(len(own) - 1, len(taught) - 1), start=1))
        features = [
            state_error(seen.projected("features", own[mine]), taught[other], seen.mask) for mine, other in pairs
        ]
        attention: list[Any] = []
        for mine, other in pairs:
            ours, theirs = seen.own_heads[mine - 1], seen.taught_heads[other - 1]
            attention.append(weight_divergence(ours.weights, theirs.weights, ours.real))  # type: ignore[arg-type]
        return {
            "features": self.feature_weight * torch.stack(features).sum(),
            "attention": self.attention_weight * torch.stack(attention).sum(),
            "logits": (1 - self.alpha) * seen.predictions(self.temperature),
        }
