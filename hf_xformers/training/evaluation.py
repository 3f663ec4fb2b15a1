# SPDX-License-Identifier: Apache-2.0
"""Token-level metrics of language models: loss, perplexity, accuracy. Exact over batches, devices and padding.

A mean of batch means weighs tokens differently, depending on how rows fall into batches. Here every row brings its
sums, and one division at the end makes the figures.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100
# exp() of more overflows a float; a loss like this is a broken model anyway.
_LARGEST_EXPONENT = 700.0


def scored(outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [B, T, V], labels [B, T]) that figures are made of: a model may have made labels itself (`targets`)."""
    logits = outputs["prediction_logits" if "prediction_logits" in outputs else "logits"]
    return one_for_each(logits, outputs.get("targets", labels))


def scored_beside(
    kinds: Mapping[str, tuple[str, str]], outputs: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """By kind (logits [B, M, C], labels [B, M]) of what a batch has to predict besides tokens; kinds: names of the
    labels, which come in or were made by the model, and of the scores of their classes."""
    found = {}
    for kind, (label, scores) in kinds.items():
        labels = inputs.get(label, outputs.get(label))
        if labels is not None and scores in outputs:
            found[kind] = one_for_each(outputs[scores], labels)
    return found


def one_for_each(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [B, T, V], labels [B, T]): labels of whole rows, [B] or [B, 1], are one of each row, and logits of the
    shape of labels are the log odds of two classes."""
    if logits.shape == labels.shape:
        return torch.stack([torch.zeros_like(logits), logits], dim=-1), labels
    return (logits.unsqueeze(1), labels.view(-1, 1)) if logits.ndim == 2 else (logits, labels)


@torch.no_grad()
def token_statistics(logits: Tensor, labels: Tensor, *, next_token: bool) -> Tensor:
    """Per row: summed negative log-likelihood (nats), number of labeled tokens, number predicted right. [B, 3].

    logits [B, T, V]; labels [B, T], -100 where there is no target. next_token: the logits at t are about the label at
    t + 1 (causal models); otherwise about the label at t.
    """
    if next_token:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device)
    target = labels != IGNORE_INDEX
    result = torch.zeros(labels.shape[0], 3, device=logits.device, dtype=torch.float32)
    # Only labeled positions: masked LM labels a seventh of them, and the vocabulary is the large axis.
    rows = target.nonzero()[:, 0]
    chosen, wanted = logits[target], labels[target]
    if not len(rows):
        return result
    precise = chosen if chosen.dtype == torch.float64 else chosen.float()
    loss = torch.nn.functional.cross_entropy(precise, wanted, reduction="none").float()
    columns = torch.stack([loss, torch.ones_like(loss), (chosen.argmax(-1) == wanted).float()], dim=1)
    return result.index_add_(0, rows, columns)


def label_counts(labels: Tensor, vocab_size: int, *, next_token: bool) -> Tensor:
    """How often each of `vocab_size` ids is a target in labels [B, T] (-100: no target), [V] int64; next_token as
    above."""
    if next_token:
        labels = labels[:, 1:]
    return torch.bincount(labels[labels != IGNORE_INDEX], minlength=vocab_size)


def frequency_baseline(counts: Tensor) -> dict[str, float]:
    """What knowing nothing but how often each token is a target would reach on these very targets.

    counts: [V], how often each id is one. `baseline_accuracy`: always the most frequent token; `baseline_loss`: their
    shares as probabilities, the entropy in nats per token. No guess that leaves the text unread is better, and a model
    that has not learned more ends there, or above: of N targets of K kinds, who knew their law but not them would lose
    about K / 2N more, which is much where targets are few.
    """
    share = counts.double() / counts.sum().clamp(min=1)
    return {"baseline_accuracy": share.max().item(), "baseline_loss": -torch.special.xlogy(share, share).sum().item()}


def perplexity(loss: float) -> float:
    """exp(loss)."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


def summarise(
    statistics: np.ndarray | Tensor, names: tuple[str, ...] = (), kinds: tuple[str, ...] = ()
) -> dict[str, float]:
    """`loss` (nats per token), `perplexity`, `accuracy` and `tokens` from the rows of [`token_statistics`].

    statistics: [N, 3 + 3 len(kinds) + len(names)]; the columns after the third are three of the same for each of
    `kinds`, of which come `<kind>_loss` and `<kind>_accuracy`, and then what is averaged over labeled tokens under
    `names`, means over the batch of a row that stand in each of its rows.
    """
    rows = np.asarray(statistics, dtype=np.float64)
    total, tokens, right = rows[:, :3].sum(axis=0).tolist()
    loss = total / max(tokens, 1.0)
    metrics: dict[str, Any] = {
        "loss": loss,
        "perplexity": perplexity(loss),
        "accuracy": right / max(tokens, 1.0),
        "tokens": int(tokens),
    }
    for index, kind in enumerate(kinds, start=1):
        total, targets, right = rows[:, 3 * index : 3 * index + 3].sum(axis=0).tolist()
        metrics[f"{kind}_loss"] = total / max(targets, 1.0)
        metrics[f"{kind}_accuracy"] = right / max(targets, 1.0)
    for index, name in enumerate(names, start=3 + 3 * len(kinds)):
        metrics[name] = (rows[:, index] * rows[:, 1]).sum().item() / max(tokens, 1.0)
    return metrics


@contextlib.contextmanager
def only_measured(model: Any) -> Iterator[None]:
    """Inside the block a Trainer can be made for a model whose weights are quantized: transformers refuses that, as
    these cannot be trained, also where they are measured alone. None: nothing is changed."""
    quantized = getattr(model, "is_quantized", False)
    if quantized:
        model.is_quantized = False
    try:
        yield
    finally:
        if quantized:
            model.is_quantized = True
