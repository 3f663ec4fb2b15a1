# SPDX-License-Identifier: Apache-2.0
"""TinyBERT: embeddings, states and attention scores of mapped layers, and then predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.components import bounded
from ..layer_maps import uniform
from ..predictions import softened_cross_entropy
from .base import DistillationMethod, Pass, register, score_error, state_error, widths


@register("tinybert")
class TinyBert(DistillationMethod):
    """In the first part of the run sum_m MSE(A_S, A_T) + MSE(H_S W, H_T), A the scores before softmax and H the
    states after layer m of the student and layer m L_T / L_S of the teacher, with MSE(E_S W_e, E_T) of the states
    before the first; in the rest the soft cross-entropy of predictions (Jiao et al. 2020, arXiv 1909.10351, equations
    7 to 11). W is learned where widths differ, and is no part of the result.

    Args:
        intermediate: share of the steps that the first part has.
        attention_weight, hidden_weight, embedding_weight, prediction_weight: of the terms.
        task_weight: of the task's own loss next to the predictions.
        temperature: of predictions.
    """

    summary = "embeddings, states and attention scores, then predictions"
    reads_states = True
    attention = ("scores",)
    intermediate: float | int = bounded(0.5, least=0, most=1)
    attention_weight: float | int = bounded(1.0, least=0)
    hidden_weight: float | int = bounded(1.0, least=0)
    embedding_weight: float | int = bounded(1.0, least=0)
    prediction_weight: float | int = bounded(1.0, least=0)
    task_weight: float | int = bounded(0.0, least=0)
    temperature: float | int = bounded(1.0, above=0)

    def early(self, progress: float) -> bool:
        """Whether a step is of the first part."""
        return progress < self.intermediate

    def teaches_predictions(self) -> bool:
        return self.intermediate < 1 and bool(self.prediction_weight or self.task_weight)

    def task_share(self, progress: float) -> float:
        return 0.0 if self.early(progress) else float(self.task_weight)

    def layers(self, student: int, teacher: int) -> dict[int, int]:
        return {mine: other - 1 for mine, other in enumerate(uniform(student, teacher))}

    def projections(self, student: Any, teacher: Any) -> dict[str, tuple[int, int]]:
        return {**widths("embeddings", student, teacher), **widths("states", student, teacher)}

    def terms(self, seen: Pass) -> dict[str, Tensor]:
        if not self.early(seen.progress):
            found = seen.predictions(self.temperature, divergence=softened_cross_entropy)
            return {"predictions": self.prediction_weight * found}
        (own, taught), mask = seen.states(), seen.mask
        embedded = seen.projected("embeddings", own[0])
        terms = {"embeddings": self.embedding_weight * state_error(embedded, taught[0], mask)}
        pairs = list(enumerate(uniform(len(own) - 1, len(taught) - 1), start=1))
        errors = [state_error(seen.projected("states", own[mine]), taught[other], mask) for mine, other in pairs]
        terms["states"] = self.hidden_weight * torch.stack(errors).sum()
        scores = [
            score_error(seen.own_heads[mine], seen.taught_heads[other])
            for mine, other in self.layers(len(own) - 1, len(taught) - 1).items()
        ]
        terms["attention"] = self.attention_weight * torch.stack(scores).sum()
        return terms
