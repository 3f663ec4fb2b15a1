# SPDX-License-Identifier: Apache-2.0
"""Terms of a loss besides that of the task, such as what a teacher adds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


class Term(NamedTuple):
    """A part of the loss, weighted as it enters it: a mean over a micro-batch, or a sum over so many labeled
    `tokens`, which count alike in the whole step."""

    value: Tensor
    tokens: Tensor | None = None


class Means:
    """Means by name over the batches since they were last taken."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.batches = 0

    def add(self, values: Mapping[str, Tensor], batches: int = 1) -> None:
        for name, value in values.items():
            value = value.detach().float().mean()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.batches += batches

    def take(self, gather: Any) -> dict[str, float]:
        """gather: a tensor [1] from every process."""
        batches, sums = self.batches, self.sums
        self.sums, self.batches = {}, 0
        return {name: gather((sums[name] / batches).reshape(1)).mean().item() for name in sorted(sums)}


class LossTerms:
    """What a `XFormerTrainer(terms=...)` adds to its loss in training; evaluation is without. Terms are logged as
    `distill_<name>`, as means since the last log."""

    columns: tuple[str, ...] = ()  # of the rows that these terms read besides what the model does

    def begin(self, trainer: Any) -> None:
        """Once the trainer has its model."""

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model is given in place of a batch."""
        return inputs

    def watching(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Around the model's pass; what it gives goes to [`LossTerms.terms`]."""
        return contextlib.nullcontext()

    def terms(self, trainer: Any, batch: dict[str, Any], outputs: Any, seen: Any) -> dict[str, Term]:
        """The terms by name. batch: with its labels, which label smoothing takes out of what the model reads."""
        raise NotImplementedError

    def task_share(self, progress: float) -> float:
        """What the task's own loss is multiplied with, so far into the run (0 to 1)."""
        return 1.0

    def loss(self, trainer: Any, model: nn.Module, inputs: dict[str, Any], count: Any) -> tuple[Tensor, Any]:
        """The loss of a micro-batch and the model's outputs. count: labeled tokens of the step, where Trainer knows
        them."""
        batch = dict(inputs)
        with self.watching(trainer.accelerator.unwrap_model(model)) as seen:
            loss, outputs = trainer.compute_task_loss(model, self.given(inputs), count)
        whole = trainer._counts_whole_step(count)  # else Trainer divides by the number of micro-batches
        batches = trainer.current_gradient_accumulation_steps if whole else 1
        total: Any = 0.0
        shown = {}
        for name, term in self.terms(trainer, batch, outputs, seen).items():
            if term.tokens is None:
                part = term.value / batches
            elif whole:
                processes = max(trainer.accelerator.num_processes, trainer.args.n_gpu)
                part = term.value * ((processes if trainer.args.average_tokens_across_devices else 1.0) / count)
            else:
                part = term.value / term.tokens.clamp(min=1)
            total, shown[name] = total + part, part * batches
        trainer.term_means.add(shown, 1 if shown else 0)
        return self.task_share(progress_of(trainer)) * loss + total, outputs


def progress_of(trainer: Any) -> float:
    """How far a run is, from 0 to 1."""
    return trainer.state.global_step / max(1, trainer.state.max_steps)
