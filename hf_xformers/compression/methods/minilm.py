# SPDX-License-Identifier: Apache-2.0
"""MiniLM: attention and value relations of one layer."""

from __future__ import annotations

from torch import Tensor

from ...core.components import bounded
from .base import DistillationMethod, Pass, register, value_relation, weight_divergence


@register("minilm")
class MiniLM(DistillationMethod):
    """KL(A_T || A_S) + KL(R_T || R_S), R = softmax(V V^T / sqrt(d)), a mean over heads and queries, of the student's
    last layer and one of the teacher (Wang et al. 2020, arXiv 2002.10957, equations 6 to 9). Widths may differ, heads
    not.

    Args:
        attention_weight, value_weight: of the two.
        teacher_layer: which of the teacher's, from 0 on or -1 for the last.
        task_weight: of the task's own loss, which the paper does without; give it one where the layers that predict
            start anew.
    """

    summary = "attention and value relations of the last layer"
    attention = ("weights", "values")
    attention_weight: float | int = bounded(1.0, least=0)
    value_weight: float | int = bounded(1.0, least=0)
    teacher_layer: int = -1
    task_weight: float | int = bounded(0.0, least=0)

    def check_fields(self) -> None:
        self._require(
            bool(self.attention_weight or self.value_weight),
            "attention_weight 0 and value_weight 0 teach nothing; give one of them a weight",
        )

    def teaches_predictions(self) -> bool:
        return bool(self.task_weight)

    def task_share(self, progress: float) -> float:
        return float(self.task_weight)

    def layers(self, student: int, teacher: int) -> dict[int, int]:
        self._require(
            -teacher <= self.teacher_layer < teacher,
            f"teacher_layer {self.teacher_layer} does not exist: the teacher has {teacher}, numbered from 0 on;"
            " correct it",
        )
        return {student - 1: self.teacher_layer % teacher}

    def terms(self, seen: Pass) -> dict[str, Tensor]:
        ours, theirs = seen.own_heads[max(seen.own_heads)], seen.taught_heads[max(seen.taught_heads)]
        terms = {}
        if self.attention_weight:
            found = weight_divergence(ours.weights, theirs.weights, ours.real)  # type: ignore[arg-type]
            terms["attention"] = self.attention_weight * found
        if self.value_weight:
            found = weight_divergence(value_relation(ours), value_relation(theirs), ours.real)
            terms["values"] = self.value_weight * found
        return terms
