# SPDX-License-Identifier: Apache-2.0
"""How far a student's predictions are from its teacher's, for every type of prediction that the heads make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.chunked_loss import divergence_of_chosen, takes_chunks
from ..ops.common.segments import accumulation_dtype

IGNORED = -100  # label of what is not predicted


def softened_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """t^2 KL(softmax(teacher / t) || softmax(student / t)) in nats of each distribution: [..., V] twice -> [...].

    Hinton et al. 2015 (arXiv 1503.02531), section 2; t^2 keeps the size of the gradient.
    """
    own, taught = (torch.log_softmax(widened(logits) / temperature, dim=-1) for logits in (student, teacher))
    return temperature**2 * (taught.exp() * (taught - own)).sum(-1)


def softened_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-sum_v softmax(teacher / t)_v log softmax(student / t)_v: [..., V] twice -> [...] (Jiao et al. 2020, arXiv
    1909.10351, equation 10, and its code)."""
    own = torch.log_softmax(widened(student) / temperature, dim=-1)
    return -(torch.softmax(widened(teacher) / temperature, dim=-1) * own).sum(-1)


def label_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """t^2 KL of independent labels, a mean over them: logits [..., C] twice -> [...]."""
    own, taught = (widened(logits) / temperature for logits in (student, teacher))
    yes = torch.sigmoid(taught)
    log = torch.nn.functional.logsigmoid
    found = yes * (log(taught) - log(own)) + (1 - yes) * (log(-taught) - log(-own))
    return temperature**2 * found.mean(-1)


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(accumulation_dtype(x.dtype))


def prediction_loss(
    student: Mapping[str, Any],
    teacher: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    temperature: float,
    problem: str | None = None,
    next_token: bool = False,
    everywhere: bool = False,
    divergence: Any = softened_divergence,
) -> Tensor:
    """A mean over what is predicted: texts, labeled tokens, starts and ends of answers.

    Args:
        student, teacher: outputs of the models.
        batch: their inputs.
        problem: `problem_type` of the configuration; numbers (regression) are compared by their squared difference,
            independent labels one by one.
        next_token: logits at t are for token t + 1.
        everywhere: at all real tokens, not at labeled ones alone.
        divergence: of two distributions.
    """
    if student.get("start_logits") is not None:
        return _answers(student, teacher, batch, temperature, divergence)
    if student.get("logits") is None:
        raise ValueError(
            f"the models predict {', '.join(name for name in student if name != 'hidden_states')} and no `logits`,"
            " which predictions are compared by; take --method minilm, or another --objective"
        )
    own, taught = student["logits"], teacher["logits"]
    if own.shape != taught.shape:
        raise ValueError(
            f"the student predicts {list(own.shape[1:])} numbers for a row and the teacher {list(taught.shape[1:])},"
            " which cannot be compared; take a student with the teacher's labels and tokens"
        )
    if problem == "regression":
        return (widened(own) - widened(taught)).square().mean()
    if problem == "multi_label_classification":
        return label_divergence(own, taught, temperature).mean()
    if own.ndim == 2:
        return divergence(own, taught, temperature).mean()
    chosen = chosen_tokens(batch, own, next_token=next_token, everywhere=everywhere)
    if next_token:
        own, taught = own[:, :-1], taught[:, :-1]
    if divergence is softened_divergence and takes_chunks(own):
        total = temperature**2 * divergence_of_chosen(own, taught, chosen, temperature)
    else:
        total = divergence(own[chosen], taught[chosen], temperature).sum()
    return total / chosen.sum().clamp(min=1)


def chosen_tokens(
    batch: Mapping[str, Any], logits: Tensor, *, next_token: bool = False, everywhere: bool = False
) -> Tensor:
    """[B, T] (T - 1 with next_token): the tokens whose predictions count."""
    labels: Any = batch.get("labels")
    mask: Any = batch.get("attention_mask")
    chosen: Tensor
    if batch.get("decoder_input_ids") is not None:  # the mask is of the text that the encoder reads
        everywhere, mask = False, batch.get("decoder_attention_mask")
    by_label = labels is not None and labels.shape[:2] == logits.shape[:2]
    same = mask is not None and mask.shape == logits.shape[:2]
    if by_label and not (everywhere and (same or mask is None)):
        chosen = labels != IGNORED
    elif same:
        chosen = mask.bool()
    else:
        chosen = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    return chosen[:, 1:] if next_token else chosen


def _answers(
    student: Mapping[str, Any],
    teacher: Mapping[str, Any],
    batch: Mapping[str, Any],
    temperature: float,
    divergence: Any,
) -> Tensor:
    """Of starts and ends, each a distribution over the real tokens of a row."""
    mask, found = batch.get("attention_mask"), []
    for name in ("start_logits", "end_logits"):
        own, taught = student[name], teacher[name]
        if mask is not None:
            own, taught = (x.masked_fill(~mask.bool(), -1e4) for x in (own, taught))
        found.append(divergence(own, taught, temperature).mean())
    return torch.stack(found).mean()
