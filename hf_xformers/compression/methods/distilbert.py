# SPDX-License-Identifier: Apache-2.0
"""DistilBERT's triple loss."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...core.components import bounded
from ..predictions import widened
from .base import DistillationMethod, Pass, mean_over_tokens, register, widths


@register("distilbert", "logits")
class DistilBert(DistillationMethod):
    """a t^2 KL(p_T || p_S) + b L_task + c (1 - cos(h_S, h_T)), on the last states (Sanh et al. 2019, arXiv 1910.01108,
    section 3, with the weights of its code).

    Args:
        temperature: t, of both predictions.
        logit_weight, task_weight, cosine_weight: a, b, c.
        tokens: where predictions of tokens are compared: at all `real` ones, or at those that the task has `labelled`.
    """

    summary = "soft predictions, and the direction of the last states"
    temperature: float | int = bounded(2.0, above=0)
    logit_weight: float | int = bounded(5.0, least=0)
    task_weight: float | int = bounded(2.0, least=0)
    cosine_weight: float | int = bounded(1.0, least=0)
    tokens: Literal["real", "labelled"] = "real"

    def check_fields(self) -> None:
        self._require(
            bool(self.logit_weight or self.cosine_weight),
            "logit_weight 0 and cosine_weight 0 teach nothing; give one of them a weight",
        )

    @property
    def reads_states(self) -> bool:  # type: ignore[override]
        return self.cosine_weight > 0

    def teaches_predictions(self) -> bool:
        return bool(self.logit_weight or self.task_weight)

    def task_share(self, progress: float) -> float:
        return float(self.task_weight)

    def projections(self, student: Any, teacher: Any) -> dict[str, tuple[int, int]]:
        return widths("last", student, teacher) if self.cosine_weight else {}

    def terms(self, seen: Pass) -> dict[str, Tensor]:
        terms = {}
        if self.logit_weight:
            terms["logits"] = self.logit_weight * seen.predictions(self.temperature, everywhere=self.tokens == "real")
        if self.cosine_weight:
            own, taught = (states[-1] for states in seen.states())
            own = widened(seen.projected("last", own))
            angle = 1 - torch.nn.functional.cosine_similarity(own, widened(taught).to(own.dtype), dim=-1)
            terms["cosine"] = self.cosine_weight * mean_over_tokens(angle, seen.mask)
        return terms
