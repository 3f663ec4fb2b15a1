# SPDX-License-Identifier: Apache-2.0
"""BERT-of-Theseus: layers of the student take the place of blocks of the teacher's, more and more often."""

from __future__ import annotations

from typing import Literal

from ...core.components import bounded
from .base import DistillationMethod, register


@register("theseus", "module_replacing")
class Theseus(DistillationMethod):
    """The teacher runs, and each of its blocks of L_T / L_S layers is replaced with probability p by one layer of the
    student, which learns from the task's loss alone; at the end p is 1 and the student stands by itself (Xu et al.
    2020, arXiv 2002.02925, section 3). Embedding and positions are the teacher's and stay as they are.

    replacing_rate: p at the start. schedule: `linear`, up to 1, or `constant`, and then 1. full_after: share of the
    steps after which p is 1.
    """

    summary = "layers that replace blocks of the teacher's while they learn"
    replaces = True
    replacing_rate: float | int = bounded(0.3, above=0, most=1)
    schedule: Literal["linear", "constant"] = "linear"
    full_after: float | int = bounded(0.7, least=0, most=1)

    def rate(self, progress: float) -> float:
        """p after that share of the steps."""
        if progress >= self.full_after:
            return 1.0
        if self.schedule == "constant":
            return float(self.replacing_rate)
        return float(self.replacing_rate + (1 - self.replacing_rate) * progress / self.full_after)
