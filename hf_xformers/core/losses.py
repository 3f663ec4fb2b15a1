# SPDX-License-Identifier: Apache-2.0
"""Losses of the heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked_loss import ChunkedCrossEntropy, takes_chunks
from .text_parts import division_in_force


def per_target(total: Tensor, count: Tensor | int) -> Tensor:
    """A sum over targets, divided by their number (of one axis or more from nn.DataParallel); as it is where there are
    none, in a batch or in a whole step."""
    return total / (count.to(total.device).squeeze().clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def token_cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy of labeled tokens, in float32 (nats per token).

    logits [..., V], labels [...]. num_items_in_batch: divide by this count instead of this batch's own (what the
    Trainer gives under gradient accumulation). A batch without a single label has loss 0 (with gradient), not NaN.
    Where texts are divided over processes, it is the loss of whole texts.
    """
    labels = labels.to(logits.device)
    if takes_chunks(logits):
        rows = logits if logits.ndim == 3 else logits.reshape(1, -1, logits.shape[-1])
        total = ChunkedCrossEntropy.apply(rows, labels.reshape(rows.shape[:2]), ignore_index)
    else:
        logits = logits.reshape(-1, logits.shape[-1])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(logits, labels.reshape(-1), ignore_index=ignore_index, reduction="sum")
    processes = division_in_force()
    total = total if processes is None else processes.total(total)
    if num_items_in_batch is None:
        own = (labels != ignore_index).sum()
        num_items_in_batch = own if processes is None else processes.total(own)
    return per_target(total, num_items_in_batch)


def class_loss(model: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """The loss of one answer for each row, as transformers has it (or a `loss_function` that was set), in float32.

    logits [B, C], labels [B], or [B, C] numbers or 0 and 1, also as integers. A batch without a label (-100) has 0.
    """
    labels = labels.to(logits.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logits.shape[-1] > 1 and labels.shape == logits.shape:
        labels = labels.to(logits.dtype)
    loss = model.loss_function(labels=labels, pooled_logits=logits, config=model.config)
    if model.config.problem_type == "single_label_classification":
        loss = loss.where((labels != -100).any(), 0.0)
    return loss


def token_binary_cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100
) -> Tensor:
    """Mean binary cross-entropy of labeled tokens, in float32 (nats per token): labels [...] are 0 or 1, or -100 for
    none, logits [...] the log odds of 1. The rest is as for [`token_cross_entropy`]."""
    labels = labels.to(logits.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    known = labels != ignore_index
    losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits.dtype), reduction="none")
    total = losses.masked_fill(~known, 0.0).sum()
    return per_target(total, known.sum() if num_items_in_batch is None else num_items_in_batch)


def answer_cross_entropy(
    start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor
) -> Tensor:
    """The mean of the cross-entropies of where answers start and where they end, in float32 (nats): logits [B, T],
    positions [B]. Positions beyond the text are left out, as in transformers; a batch of nothing else has loss 0."""
    length = start_logits.shape[1]

    def of_one(logits: Tensor, positions: Tensor) -> Tensor:
        labels = positions.view(-1).to(logits.device).clamp(min=0)
        return token_cross_entropy(logits, labels.masked_fill(labels >= length, -100))

    return (of_one(start_logits, start_positions) + of_one(end_logits, end_positions)) / 2


def labels_after_real_tokens(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Labels [B, T] of a causal model (the shift is still to come), -100 where the token before is padding: with
    padding on the left no real token predicts a text's first one. attention_mask [B, T], or [B, cached + T]; other
    masks change nothing."""
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.shape[1] < labels.shape[1]:
        return labels
    real = attention_mask.to(labels.device) != 0
    before = F.pad(real[:, :-1], (1, 0), value=True)[:, -labels.shape[1] :]
    return labels.masked_fill(~before, -100)


def counted_after_real_tokens(
    logits: Tensor, labels: Tensor, attention_mask: Tensor | None, num_items_in_batch: Tensor | int | None
) -> tuple[Tensor, Tensor | int | None]:
    """[`labels_after_real_tokens`], and the count less what padding takes away ([`counted_of`])."""
    kept = labels_after_real_tokens(labels, attention_mask)
    if kept is labels:
        return kept, num_items_in_batch
    return kept, counted_of(kept[:, 1:], labels[:, 1:], num_items_in_batch, logits.dtype)


def counted_of(
    kept: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None, dtype: torch.dtype
) -> Tensor | int | None:
    """The count of a step's targets less what its caller, who does not know that a model leaves out labels (those
    that are -100 in `kept` alone), has counted too much: in every batch the same share, so that the loss is the mean
    of those that are left."""
    if num_items_in_batch is None:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    left, counted = ((each != -100).sum().clamp(min=1).to(wide) for each in (kept, labels))
    return num_items_in_batch * (left / counted)


def direction_targets(labels: Tensor, real: Tensor) -> Tensor:
    """labels [B, T], ids or -100, of texts whose real tokens are `real` [B, T] boolean -> [B, T, 2]: the next token,
    for a model that reads from the beginning, and the one before, for one that reads from the end; -100 where there
    is none."""
    beside = real[:, 1:] & real[:, :-1]
    nothing = torch.full_like(labels[:, :1], -100)
    ahead = torch.cat([labels[:, 1:].masked_fill(~beside, -100), nothing], dim=1)
    before = torch.cat([nothing, labels[:, :-1].masked_fill(~beside, -100)], dim=1)
    return torch.stack([ahead, before], dim=-1)


def next_token_cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100
) -> Tensor:
    """Causal LM loss: logits [B, T, V] at t are compared with labels [B, T] at t + 1; the last logit has no target."""
    return token_cross_entropy(logits[:, :-1], labels[:, 1:], num_items_in_batch, ignore_index)


class StepShare(NamedTuple):
    """What part of an optimizer's step a batch is: `own` of the `total` targets of all its batches and processes."""

    own: Tensor
    total: Tensor | int

    def of(self, loss: Tensor) -> Tensor:
        """A mean over this batch -> what it adds to the mean over the step."""
        own = self.own.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        return loss * per_target(own, self.total)


def step_share(
    labels: Tensor | None, num_items_in_batch: Tensor | int | None, *, shifted: bool = False
) -> StepShare | None:
    """The share of a batch with these labels (-100: no target); shifted: those of a causal model, [B, T], of which the
    first column is no target. None without labels or without a count: the batch is a whole."""
    if labels is None or num_items_in_batch is None:
        return None
    own, processes = ((labels[:, 1:] if shifted else labels) != -100).sum(), division_in_force()
    return StepShare(own if processes is None else processes.total(own), num_items_in_batch)


def with_aux_losses(
    loss: Tensor | None, aux_losses: dict[str, Tensor] | None, share: StepShare | None = None
) -> Tensor | None:
    """The task loss plus every auxiliary loss (each already carries its component's weight). share: of the batch in
    the step by whose targets the task loss is divided, by which auxiliary losses, means over the batch, then count
    too: so a step has their mean over its batches, weighted by targets, however many batches and processes it has."""
    if loss is None:
        return None
    for aux in (aux_losses or {}).values():
        loss = loss + (aux if share is None else share.of(aux))
    return loss
