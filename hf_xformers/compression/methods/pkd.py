# SPDX-License-Identifier: Apache-2.0
"""Patient knowledge distillation: the first token's states after several layers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...core.components import bounded
from ...core.pooling import pool
from ..layer_maps import patient
from ..predictions import widened
from .base import DistillationMethod, Pass, register, widths


@register("pkd", "patient")
class PatientDistillation(DistillationMethod):
    """(1 - a) L_task + a t^2 KL(p_T || p_S) + b sum_k | h_S / |h_S| - h_T / |h_T| |^2, a mean over rows; h is the
    state of the text's first token ([CLS]; in a decoder of its last) after layer k (Sun et al. 2019, arXiv 1908.09355,
    equations 5 and 7).

    Args:
        alpha, beta: a and b (the paper tries 10 to 1000 for b on a distance that its code divides by layers and width,
            which is about 0.003 to 0.3 here).
        temperature: t.
        strategy: teacher's layers k, every second or third one (`skip`) or the last ones (`last`); the very last meets
            the student's in the predictions.
    """

    summary = "predictions, and the first token's states after some layers"
    reads_states = True
    alpha: float | int = bounded(0.5, least=0, most=1)
    beta: float | int = bounded(0.1, least=0)
    temperature: float | int = bounded(5.0, above=0)
    strategy: Literal["skip", "last"] = "skip"

    def task_share(self, progress: float) -> float:
        return 1.0 - self.alpha

    def projections(self, student: Any, teacher: Any) -> dict[str, tuple[int, int]]:
        return widths("first_token", student, teacher)

    def check(self, student: Any, teacher: Any) -> None:
        super().check(student, teacher)
        patient(student.config.num_hidden_layers, teacher.config.num_hidden_layers, self.strategy)

    def terms(self, seen: Pass) -> dict[str, Tensor]:
        own, taught = seen.states()
        terms = {"logits": self.alpha * seen.predictions(self.temperature)}
        places = enumerate(patient(len(own) - 1, len(taught) - 1, self.strategy), start=1)
        where = "last" if seen.config.is_decoder else "first"
        total: Any = 0.0
        for mine, other in places:
            ours = seen.projected("first_token", pool(own[mine], seen.mask, where))
            theirs = pool(taught[other], seen.mask, where)
            ours, theirs = (torch.nn.functional.normalize(widened(x), dim=-1) for x in (ours, theirs))
            total = total + (ours - theirs).square().sum(-1).mean()
        if isinstance(total, Tensor):
            terms["states"] = self.beta * total
        return terms
