# SPDX-License-Identifier: Apache-2.0
"""Passes of student and teacher as a method of distillation needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from .heads import heads_of
from .methods import DistillationMethod

_LABELS = ("labels", "start_positions", "end_positions")


def asked(method: DistillationMethod) -> dict[str, bool]:
    """What both models are asked for besides their outputs."""
    wanted = {"output_hidden_states": True} if method.reads_states else {}
    return {**wanted, "output_attentions": True} if method.attention else wanted


def own_heads(method: DistillationMethod, student: Any, depths: tuple[int, int]) -> Any:
    """Where the student's heads leave what the method compares."""
    if not method.attention:
        return contextlib.nullcontext({})
    return heads_of(student, method.layers(*depths).keys(), scores="scores" in method.attention)


def teacher_pass(
    method: DistillationMethod, teacher: Any, batch: Mapping[str, Any], depths: tuple[int, int]
) -> tuple[Mapping[str, Any], dict[int, Any]]:
    """The teacher's outputs and heads for a batch of the student's."""
    given = dict(batch)
    if not teacher.config.is_encoder_decoder:  # whose decoder reads the labels
        given = {name: value for name, value in given.items() if name not in _LABELS}
    if method.attention:
        heads = heads_of(teacher, set(method.layers(*depths).values()), scores="scores" in method.attention)
    else:
        heads = contextlib.nullcontext({})  # type: ignore[assignment]
    with torch.no_grad(), heads as theirs:
        return teacher(**given, **asked(method)), theirs
