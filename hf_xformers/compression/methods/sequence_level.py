# SPDX-License-Identifier: Apache-2.0
"""Sequence-level distillation: the student is trained on what the teacher writes."""

from __future__ import annotations

from ...core.components import bounded
from .base import DistillationMethod, register


@register("sequence_level", "seq_kd")
class SequenceLevel(DistillationMethod):
    """L_task on the teacher's own texts: of an encoder-decoder its beam's output for each source text, of a causal
    model its continuation of the first tokens of each row (Kim and Rush 2016, arXiv 1606.07947, section 3.2).

    num_beams: beams of the teacher's search. prompt_tokens: of a causal model, tokens of a row that are given.
    """

    summary = "training on the teacher's generated texts"
    generates = True
    num_beams: int = bounded(5, least=1)
    prompt_tokens: int = bounded(16, least=1)
