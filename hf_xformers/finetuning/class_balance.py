# SPDX-License-Identifier: Apache-2.0
"""Losses in which rare classes count more: the usual remedy where one class has nearly all examples, as in tagging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.losses import per_target
from ..modeling.crf import LinearChainCRF

IGNORE_INDEX = -100


def class_weights(labels: Iterable[int | list[int]], classes: int, balance: float) -> Tensor:
    """Weights w_c ~ n_c ** -balance, [classes] float32, whose mean over the n examples is 1; n_c: examples of class c.

    labels: class ids, or a list of them for each row; -100 is no example. balance: 0, every example counts alike; 1,
    every class does (what scikit-learn calls "balanced"). A class without an example has weight 1.
    """
    counts = torch.zeros(classes, dtype=torch.float64)
    for entry in labels:
        ids = torch.as_tensor(entry).reshape(-1)
        counts += torch.bincount(ids[ids != IGNORE_INDEX], minlength=classes)
    known = counts > 0
    weights = torch.where(known, counts.clamp(min=1.0) ** -balance, 0.0)
    weights *= counts.sum() / (weights * counts).sum()
    return torch.where(known, weights, 1.0).float()


def weigh_sequences(model: nn.Module, weights: Tensor) -> bool:
    """Gives the weights to the model's chains of tags; whether it has any."""
    chains = [module for module in model.modules() if isinstance(module, LinearChainCRF)]
    for chain in chains:
        chain.weigh(weights)
    return bool(chains)


class BalancedLoss:
    """Cross-entropy times the weight of the true class, over the number of examples: what `Trainer` takes as
    `compute_loss_func`. outputs: with `logits` [..., classes]; labels [...]."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits = outputs["logits"].flatten(0, -2).float()
        labels = labels.reshape(-1).to(logits.device)
        weights = self.weights.to(logits.device)
        total = F.cross_entropy(logits, labels, weights, ignore_index=IGNORE_INDEX, reduction="sum")
        return per_target(total, (labels != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch)
