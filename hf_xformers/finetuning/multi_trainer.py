# SPDX-License-Identifier: Apache-2.0
"""The trainer of several tasks at once: batches of one task each, evaluation of all in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..training.randomness import data_seed, preserved_randomness
from .class_balance import BalancedLoss
from .multi_task import TASK, MultiTaskOptions, NamedRows, TaskBatchSampler
from .tasks import Encoded, Task
from .tasks.multilabel import MultiLabelClassification
from .trainer import TaskTrainer
from .uncertainty import CANDIDATES, UNCERTAINTY, CandidateSampler, most_uncertain, rows_of, uncertainty

MEAN = "mean"  # of the tasks' main metrics
ANSWERS = ("labels", "start_positions", "end_positions")


class MultiTaskTrainer(TaskTrainer):
    """`TaskTrainer` for a [`MultiTaskModel`]: a batch is of one task, and an evaluation is of all in turn.

    Args:
        tasks, validations: by name.
        options: how often each task comes.
        losses: by name, in place of the loss of the task's head.
    """

    def __init__(
        self,
        *args: Any,
        tasks: Mapping[str, Task],
        validations: Mapping[str, Encoded],
        options: MultiTaskOptions,
        losses: Mapping[str, BalancedLoss] | None = None,
        **kwargs: Any,
    ) -> None:
        self.tasks, self.validations, self.options = dict(tasks), dict(validations), options
        self.losses = dict(losses or {})
        super().__init__(*args, task=next(iter(tasks.values())), validation=None, **kwargs)
        if any(task.mean_loss for task in tasks.values()):  # micro-batches of a step may be of different kinds
            self.model_accepts_loss_kwargs = False

    def get_train_dataloader(self) -> Any:
        rows: Any = self.train_dataset
        if len(rows.parts) == 1:
            return super().get_train_dataloader()
        sizes, size = [len(part) for part in rows.parts], self._train_batch_size
        seed = data_seed(self.args)
        processes = self.accelerator.num_processes
        sampler: Any = TaskBatchSampler(sizes, size, self.options.exponent, seed=seed, processes=processes)
        if self.options.sampling == UNCERTAINTY:
            sampler = CandidateSampler(sizes, size, seed=seed)
        return self.loader_of(rows, sampler)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch of one task, or of the least certain rows of candidates: each task's loss by its share
        of them."""
        if CANDIDATES not in inputs:
            return self._task_loss(model, inputs, return_outputs, num_items_in_batch)
        candidates = inputs[CANDIDATES]
        chosen = most_uncertain(self._uncertainties(model, candidates), self._train_batch_size)
        count = sum(map(len, chosen.values()))
        losses = []
        for name, rows in chosen.items():
            loss = self._task_loss(model, {**rows_of(candidates[name], rows), TASK: name})
            losses.append(len(rows) / count * loss)
        return torch.stack(losses).sum()

    def _task_loss(self, model: nn.Module, inputs: dict[str, Any], *options: Any) -> Any:
        """The loss of rows of one task."""
        before, self.task = self.task, self.tasks[inputs[TASK]]
        self.compute_loss_func = self.losses.get(inputs[TASK])
        try:
            return super().compute_loss(model, inputs, *options)
        finally:
            self.compute_loss_func, self.task = None, before

    def _tasks_of(self, model: Any) -> list[tuple[Any, Task]]:
        heads = self.accelerator.unwrap_model(model).heads
        return [(heads[name], task) for name, task in self.tasks.items()]

    @torch.no_grad()
    def _uncertainties(self, model: nn.Module, candidates: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Of every candidate, without dropout."""
        found = {}
        model.eval()
        for name, batch in candidates.items():
            task = self.tasks[name]
            given = {key: value for key, value in batch.items() if key not in ANSWERS}
            with self.compute_loss_context_manager():
                outputs = model(task=name, **given)
            several = isinstance(task, MultiLabelClassification)
            found[name] = uncertainty(task.head, outputs, batch, several=several)
        model.train()
        return found

    def predict_task(self, name: str, split: Encoded, prefix: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(predicted rows, metrics named `<prefix>_...`) of a split of one task."""
        before, self.task = self.task, self.tasks[name]
        try:
            return self.predict_rows(dataclasses.replace(split, features=NamedRows(split.features, name)), prefix)
        finally:
            self.task = before

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        main, losses = [], []
        with preserved_randomness():
            for name, split in self.validations.items():
                prefix, task = f"{metric_key_prefix}_{name}", self.tasks[name]
                _, found = self.predict_task(name, split, prefix)
                kept = [f"{prefix}_{metric}" for metric in ("loss", *task.metric_names)]
                metrics |= {key: found[key] for key in kept if key in found}
                main.append(found.get(f"{prefix}_{task.metric}", float("nan")) / (100 if task.percent else 1))
                losses.append(found.get(f"{prefix}_loss", float("nan")))
        metrics[f"{metric_key_prefix}_{MEAN}"] = sum(main) / len(main)
        metrics[f"{metric_key_prefix}_loss"] = sum(losses) / len(losses)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
