# SPDX-License-Identifier: Apache-2.0
"""Discrete choices that learn from the task's loss: how their probabilities travel, and the policy gradient.

A component that draws choices in training (which tokens to read, say) is taught by no gradient of its output. It hands
the logarithm of the probability of what it drew out among its auxiliary losses, one number for each row of the batch,
under [`LOG_PROBS`]; its spec says so by [`ChoosingSpec`]. They are added up over layers and towers, and the head that
knows the task's loss turns them into a loss of their own ([`ChoiceLoss`]). Nothing of it exists in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from .call_features import CallFeature
from .distributed import sum_over_processes
from .losses import per_target
from .precision import Float32Module

# Name among auxiliary losses of log p of the choices of a call, [B], times the weight of its component; a tower takes
# it out of them (`TowerOutput.log_probs`).
LOG_PROBS = "log_probs_of_choices"


@dataclass(frozen=True)
class ChoiceSettings:
    """What one baseline of a model needs. baseline_decay: of the running mean of the task's loss."""

    baseline_decay: float


@runtime_checkable
class ChoosingSpec(Protocol):
    """A spec whose component draws choices that learn from the task's loss."""

    def choice_settings(self) -> ChoiceSettings | None:
        """What its loss needs; None where it draws nothing as it is set."""


class ChoiceLogProbs(CallFeature):
    """Takes what was drawn out of the auxiliary losses."""

    def leave(self, result: Any) -> dict[str, Any]:
        return {"log_probs": result.aux_losses.pop(LOG_PROBS, None)}


class RowLosses(NamedTuple):
    """The task's loss by rows of the batch, without gradients. losses [B]: what each row adds to it; shares [B]: what
    part of all that is predicted stands in the row, so that losses / shares are means of rows."""

    losses: Tensor
    shares: Tensor


class ChoiceLoss(Float32Module):
    """sum_r (l_r - s_r b) log p(choices of row r), with l_r detached: its gradient is an unbiased estimate of that of
    the expected task loss with respect to the parameters of p (REINFORCE; Williams 1992, equation 6), for each l_r
    depends on the choices of its own row alone.

    l_r is what row r adds to the task's loss, s_r its share of what is predicted, and b a running mean of the loss per
    predicted item over all processes, b <- decay b + (1 - decay) mean, which moves once per training pass with a loss.
    b is of passes before this one and so depends on no choice that it weighs; without any (`passes` is 0) a pass has
    nothing to compare with, and teaches nothing. Where a head does not know its loss by rows, every choice answers for
    the whole loss, which is unbiased, too, with more variance. The value is zero, so that losses read as they are.
    """

    mean: Tensor
    passes: Tensor

    def __init__(self, settings: ChoiceSettings):
        super().__init__()
        self.decay = settings.baseline_decay
        self.register_buffer("mean", torch.zeros((), dtype=torch.float32))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def initialize(self, config, init) -> None:
        init.zeros_(self.mean)
        init.zeros_(self.passes)

    def forward(self, log_probs: Tensor, loss: Tensor, rows: RowLosses | None) -> Tensor:
        """log_probs [B], the task's loss, and the same by rows where they are known -> a scalar."""
        loss = loss.detach()
        if rows is None or rows.losses.shape != log_probs.shape:
            rows = RowLosses(loss.expand(log_probs.shape), torch.ones_like(log_probs))
            number = loss.new_ones(())
        else:
            loss, number = rows.losses.sum(), rows.shares.sum()
        known = (self.passes > 0).to(log_probs.dtype)
        advantage = known * (rows.losses - rows.shares * self.mean.to(rows.losses.dtype)).to(log_probs.dtype)
        if log_probs.requires_grad:  # a pass that teaches nothing, as one of frozen parameters, is none
            self._follow(loss, number)
        taught = (advantage * log_probs).sum()
        return taught - taught.detach()

    @torch.no_grad()
    def _follow(self, total: Tensor, number: Tensor) -> None:
        both = sum_over_processes(torch.stack((total.to(self.mean), number.to(self.mean))))
        there = (both[1] > 0).to(self.mean)  # a batch without a single target says nothing
        mean = both[0] / both[1].clamp(min=torch.finfo(self.mean.dtype).tiny)
        decay = torch.where(self.passes > 0, self.decay, 0.0).to(self.mean)
        self.mean.copy_(self.mean + there * (1 - decay) * (mean - self.mean))
        self.passes += there.long()


def build_choice_loss(specs: Iterable[Any]) -> ChoiceLoss | None:
    """The loss of all components with `specs` that choose; None where none does.

    Raises:
        ValueError: their settings differ, though the task has one loss, and so one baseline.
    """
    found = {spec.choice_settings() for spec in specs if isinstance(spec, ChoosingSpec)} - {None}
    if len(found) > 1:
        decays = sorted(settings.baseline_decay for settings in found if settings is not None)
        raise ValueError(
            f"Layers that learn from the task's loss share one baseline, but have decays {decays} for it; give all the"
            " same."
        )
    settings = next(iter(found), None)
    return None if settings is None else ChoiceLoss(settings)


def joint(log_probs: list[Tensor]) -> Tensor:
    """Logarithms of the probabilities of several towers' choices, [B] each -> of all of them, by rows if the rows of
    both are the same texts, else as one number [1]."""
    if len({found.shape for found in log_probs}) > 1:
        log_probs = [found.sum()[None] for found in log_probs]
    return torch.stack(log_probs).sum(0)


@torch.no_grad()
def token_rows(
    logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None, shifted: bool = False
) -> RowLosses | None:
    """[`RowLosses`] of the mean cross-entropy of labeled tokens: logits [B, T, V], labels [B, T] (-100: none).
    shifted: labels are those of a causal model, compared with the logits before them. None without labels."""
    if labels is None:
        return None
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    labels = labels.to(logits.device)
    losses = F.cross_entropy(wide.transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(1)
    items = (labels != -100).sum(1).to(losses.dtype)
    count = items.sum() if num_items_in_batch is None else num_items_in_batch
    return RowLosses(per_target(losses, count), per_target(items, count))


@torch.no_grad()
def rows_of_mean(loss_of: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> RowLosses | None:
    """[`RowLosses`] of a loss that is a mean over rows: `loss_of(labels [1, ...], logits [1, C])` of each."""
    count = logits.shape[0]
    losses = [loss_of(labels[row : row + 1], logits[row : row + 1]) for row in range(count)]
    found = torch.stack(losses) / count
    return RowLosses(found, torch.full_like(found, 1 / count))
