# SPDX-License-Identifier: Apache-2.0
"""The trainer of tasks: evaluates in rows of the task, with generation where the task generates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers.trainer_utils import EvalPrediction

from ..training.evaluation import summarise
from ..training.trainer import XFormerTrainer
from .label_unit import learn_in_unit
from .layerwise import GradualUnfreezing, LayerGroups, LayerwiseOptions, slanted_schedule, spread_rates
from .self_ensemble import EnsembleCallback, SelfEnsemble
from .tasks import Encoded, Task


class TaskTrainer(XFormerTrainer):
    """`XFormerTrainer` whose predictions are rows of a task.

    A head whose loss is a mean over rows gets it divided by the accumulation steps: what transformers does for models
    whose `forward` takes further arguments is right only for losses that are divided by the tokens of the whole step.

    Args:
        task: what to measure.
        validation: the split that `evaluate` is about; `predict_rows` takes any.
        layerwise: which layers learn when, and how fast.
        groups: the layers, if it goes by them.
        ensemble: the weights of past steps, as a teacher or as what is evaluated.
    """

    def __init__(
        self,
        *args: Any,
        task: Task,
        validation: Encoded | None,
        layerwise: LayerwiseOptions | None = None,
        groups: LayerGroups | None = None,
        ensemble: SelfEnsemble | None = None,
        **kwargs: Any,
    ) -> None:
        self.task, self._split = task, validation
        self.layerwise, self.groups = layerwise or LayerwiseOptions(), groups
        self.ensemble = ensemble
        self.rows: list[dict[str, Any]] = []
        self._order: np.ndarray | None = None  # of the features, where it is not that of the split
        super().__init__(*args, compute_metrics=self._score, **kwargs)
        self.args.eval_do_concat_batches = True  # what is scored belongs to rows by its place among all
        if task.mean_loss:
            self.model_accepts_loss_kwargs = False
        self.unfreezing: GradualUnfreezing | None = None
        if groups is not None and self.layerwise.unfreeze_every is not None:
            self.unfreezing = GradualUnfreezing(groups, self.layerwise.unfreeze_every)
            self.add_callback(self.unfreezing)
        if ensemble is not None:
            self.add_callback(EnsembleCallback(ensemble))

    # ------------------------------------------------------------------------------------------------ training

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        made = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        decay = self.layerwise.layer_decay
        if not made and self.groups is not None and decay not in (None, 1):
            spread_rates(optimizer, self.groups, decay)
        for one, task in [] if made else self._tasks_of(self.model if model is None else model):
            learn_in_unit(optimizer, one, task.unit[1])
        return optimizer

    def _tasks_of(self, model: Any) -> list[tuple[Any, Task]]:
        """The models of what is trained, each with its task."""
        return [(self.accelerator.unwrap_model(model), self.task)]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.layerwise.slanted_triangular or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        chosen = self.layerwise
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = slanted_schedule(optimizer, num_training_steps, chosen.cut_frac, chosen.slanted_ratio)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_task_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> tuple[Tensor, Any]:
        labels = inputs.get("labels")
        loss, outputs = super().compute_task_loss(model, inputs, num_items_in_batch)
        if self.ensemble is not None and self.ensemble.teaches and model.training:
            whole = self._counts_whole_step(num_items_in_batch)
            error = self.ensemble.error(outputs["logits"], labels, inputs, num_items_in_batch if whole else None)
            self.aux_means.add({"self_distillation": error}, 0 if outputs.get("aux_losses") else 1)
            processes = self.accelerator.num_processes if whole and self.args.average_tokens_across_devices else 1
            loss = loss + self.ensemble.options.self_distillation_weight * processes * error
        if model.training and self.task.unit[1] != 1:  # of layers' own losses none knows the unit
            own = sum((outputs.get("aux_losses") or {}).values())
            loss = own + (loss - own) / self.task.unit[1] ** 2
        return loss, outputs

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.ensemble is not None and self.args.should_save:
            self.ensemble.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.ensemble is not None and checkpoint is not None:
            self.ensemble.load(checkpoint)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if self.ensemble is None else self.ensemble.averaged():
            return super().evaluation_loop(*args, **kwargs)

    def predict_rows(
        self, split: Encoded, prefix: str, *, by_length: bool = False
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(predicted rows, metrics named `<prefix>_...`) of a split.

        by_length: batches of like lengths, the longest first; the rows stay in their order.
        """
        before, self._split = self._split, split
        features = split.features
        if by_length and "input_ids" in features.column_names:
            self._order = np.argsort([-_length(ids) for ids in features["input_ids"]], kind="stable")
            features = features.select(self._order)
        try:
            metrics = self.predict(features, metric_key_prefix=prefix).metrics or {}
        finally:
            self._split, self._order = before, None
        return self.rows, metrics

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        # Predictions belong to rows by their place; Trainer's own would sort by length under `group_by_length`.
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs: dict[str, Any] = dict(model(**inputs))
            generates = self.task.generates and self.args.predict_with_generate  # type: ignore[attr-defined]
            if generates and not prediction_loss_only:
                outputs["generated"] = self._generate(model, inputs)
        loss = outputs.get("loss")
        loss = None if loss is None else loss.detach().mean()
        if prediction_loss_only:
            return loss, None, None
        kept = self.task.reduce(outputs, inputs, self._predicts_next_token)
        rows = kept[0].shape[0]
        if self.task.mean_loss and loss is not None:
            kept = (*kept, loss.float().expand(rows))  # Trainer's own mean takes every batch for a full one
        return loss, kept, torch.zeros(rows, device=kept[0].device)  # Trainer wants labels besides predictions

    def _generate(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """[B, longest target]: generated ids without the start, -100 after the end."""
        unwrapped: Any = self.accelerator.unwrap_model(model)
        # Seq2SeqTrainingArguments' names; --generation_max_length counts the start token, as in transformers.
        limit, beams = self.args.generation_max_length, self.args.generation_num_beams  # type: ignore[attr-defined]
        longest = self.task.max_target_length if limit is None else limit - 1  # type: ignore[attr-defined]
        given = {key: value for key, value in inputs.items() if key != "labels" and not key.startswith("decoder_")}
        options = {} if beams is None else {"num_beams": beams}
        made = unwrapped.generate(**given, max_new_tokens=longest, do_sample=False, **options)[:, 1:]
        return torch.nn.functional.pad(made, (0, max(0, longest - made.shape[1])), value=-100)

    def _score(self, evaluated: EvalPrediction) -> dict[str, float]:
        if self._split is None:  # a dataset that is not of the task's splits
            return {}
        found = evaluated.predictions
        kept: Sequence[np.ndarray] = found if isinstance(found, (tuple, list)) else (found,)
        if self._order is not None:
            places = np.argsort(self._order)
            kept = [array[places] for array in kept]
        means = self.task.mean_loss and self._split.labelled
        if means:
            *kept, losses = kept
        self.rows = self.task.predictions(kept, self._split)
        if not self._split.labelled:
            return {}
        metrics = self.task.score(self.rows) if self.rows else {}
        if means:
            return {**metrics, "loss": float(losses.mean(dtype=np.float64))}
        sums = self.task.token_sums(kept)
        return metrics if sums is None else {**metrics, "loss": summarise(sums)["loss"]}


def _length(ids: Sequence[Any]) -> int:
    """Tokens of a feature: of a list of choices those of the longest."""
    return max(map(len, ids)) if len(ids) and isinstance(ids[0], Sequence) else len(ids)
