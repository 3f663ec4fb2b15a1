# SPDX-License-Identifier: Apache-2.0
"""The classifiers inside an early-exit stack, and what they decide during one call."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..core.losses import class_loss
from ..core.outputs import XFormerEarlyExitClassifierOutput

# A sequence classifier (`XFormerForSequenceClassification`), which stands above the stacks.
Classifier: TypeAlias = Any


class EarlyExits(nn.Module):
    """Classifiers after layers 1 .. L - 1 of a sequence classifier; the one after layer L is the model's own.

    They read a layer's states as the last classifier reads the last layer's: through the final norm where there is
    one.

    pools_answers: a rule has a method `answers_of(logits, rows)`, whose answers stand for the last classifier's.
    """

    pools_answers: ClassVar[bool] = False

    def logits(self, model: Classifier, layer: int, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        """[R, T, D] after layer 1, 2, ... -> [R, num_labels]."""
        raise NotImplementedError

    def rule(self, model: Classifier) -> Any | None:
        """`rule(layer, logits [R, C], rows [R] or None) -> [R] boolean`, or None if no row can leave early."""
        raise NotImplementedError

    def training_loss(self, losses: list[Tensor]) -> Tensor:
        """The objective from the losses of the classifiers 1 .. L."""
        raise NotImplementedError

    def further_loss(self, answers: list[Tensor], kind: str | None) -> Tensor | None:
        """What training adds by the logits [B, C] of the classifiers 1 .. L; kind: `problem_type`. None: nothing."""
        return None

    @property
    def trunk_learns(self) -> bool:
        """Whether gradients go into the layers and the last classifier."""
        return True

    def classify(self, model: Classifier, labels: Tensor | None, inputs: dict[str, Any]):
        """The whole forward pass of `model`, an `XFormerForSequenceClassification`."""
        watch: _Collector | _Run | None = None
        if model.training and labels is not None:
            watch = _Collector()
        elif not model.training:
            rule = self.rule(model)
            watch = None if rule is None else _Run(self, model, rule)
        frozen = watch is not None and model.training and not self.trunk_learns
        with torch.no_grad() if frozen else nullcontext():
            base = model.model(**inputs, exit_watch=watch)
            logits = model.classifier(model.dropout(model.pooled(base, inputs.get("attention_mask"))))
        exit_layers: Any = None
        if not model.training:
            count = torch.full_like(logits[:, 0], model.config.num_hidden_layers, dtype=torch.long)
            exit_layers = count
            if isinstance(watch, _Run):
                logits = watch.last(model.config.num_hidden_layers, logits)
            if isinstance(watch, _Run) and watch.left is not None:
                left = watch.left
                logits = torch.where(left.running[:, None], logits, left.answers)
                exit_layers = torch.where(left.running, count, left.layers)
        loss = None
        if labels is not None:
            loss_of = partial(class_loss, model, labels)
            if isinstance(watch, _Collector):
                inner = [self.logits(model, number, *seen) for number, seen in enumerate(watch.seen, start=1)]
                answers = [*inner, logits]
                loss = self.training_loss([loss_of(one) for one in answers])
                further = self.further_loss(answers, model.config.problem_type)
                loss = loss if further is None else loss + further
            else:
                loss = loss_of(logits)
        return XFormerEarlyExitClassifierOutput(
            loss=model.with_aux_losses(loss, base),
            logits=logits,
            exit_layers=exit_layers,
            **model.recorded(base, loss),
        )


class _Collector:
    """Keeps every layer's output, for the losses of a training step."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None) -> None:
        self.seen.append((hidden_states, padding_mask))


class _Left(NamedTuple):
    """Answers [B, C] and layers [B] of the rows that left, `running` [B]: those that did not."""

    answers: Tensor
    layers: Tensor
    running: Tensor


class _Run:
    """The exits of one batch."""

    def __init__(self, exits: EarlyExits, model: Classifier, rule: Any):
        self.exits, self.model, self.rule = exits, model, rule
        self.left: _Left | None = None

    def __call__(self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None) -> Tensor:
        logits = self.exits.logits(self.model, layer, hidden_states, padding_mask)
        leaves = self.rule(layer, logits, rows)
        logits = self._answers(logits, rows)
        left = self.left
        if left is None:
            start = torch.zeros_like(leaves, dtype=torch.long)
            left = _Left(torch.zeros_like(logits), start, torch.ones_like(leaves))
        if rows is None:  # the whole batch, among it rows that have left before
            leaves = leaves & left.running
            everyone = leaves
        else:
            logits = torch.zeros_like(left.answers).index_copy(0, rows, logits)
            everyone = torch.zeros_like(left.running).index_copy(0, rows, leaves)
        answers, layers = (
            torch.where(everyone[:, None], logits, left.answers),
            torch.where(everyone, layer, left.layers),
        )
        self.left = _Left(answers, layers, left.running & ~everyone)
        return leaves

    def _answers(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        """What the rule makes of a classifier's logits [R, C], as answers of the rows that leave with it."""
        return self.rule.answers_of(logits, rows) if self.exits.pools_answers else logits

    def last(self, layer: int, logits: Tensor) -> Tensor:
        """The answers of the rows that ran through all layers; those of others do not matter."""
        if not self.exits.pools_answers:
            return logits
        self.rule(layer, logits, None)
        return self._answers(logits, None)


def final_norm(model: Classifier, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
    """What the classifier above the last layer is given: the trunk's last norm, where it has one."""
    trunk = model.model.trunk
    if trunk.final_norm is None:
        return hidden_states
    given = {"mask": padding_mask} if trunk.final_normalization.over_tokens else {}
    return trunk.final_norm(hidden_states, **given)
