# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer for pretraining: exact metrics, auxiliary losses by name, evaluation that leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils import logging

from ..compat import LabelSmoother, read_columns
from ..configuration_xformer import XFormerConfig
from ..core.call_readers import check_sharding, sharding_in_force
from ..core.losses import labels_after_real_tokens, step_share
from ..core.weight_decay import declared_undecayed
from ..data.batching import LengthGroupedBatchSampler
from ..metrics import is_error
from .devices import processes_of
from .evaluation import (
    IGNORE_INDEX,
    only_measured,
)
from .expert_parts import ExpertParts
from .float32_shards import keep_float32_in_shards
from .head_pieces import has_further_losses
from .loss_terms import LossTerms, Means
from .randomness import data_seed
from .recipe import Recipe, row_lengths, smoothing_among_all, vaswani_schedule
from .replay import carrier_of
from .segments import SEGMENT_START, SegmentCarrier, StreamSampler
from .sequence_parts import SequenceParts, real_rows
from .trainer_evaluation import MeasuringTrainer

logger = logging.get_logger(__name__)


class XFormerTrainer(MeasuringTrainer):
    """Trainer with thirteen differences.

    - Auxiliary losses (`outputs.aux_losses`) are logged as `aux_<name>`, means since the last log, and count under
      label smoothing and class weights too, for which Trainer makes the loss from logits alone.
    - With several processes, the rows that fill up the last batch of an epoch, which were in the first, are padding
      where the loss is one over the tokens of the whole step, and count neither in it nor in statistics: what is
      learned does not depend on the number of processes.
    - Evaluation reports loss, perplexity and accuracy over all labeled tokens, what token frequencies alone would
      reach (`baseline_loss`, `baseline_accuracy`), the same of what a model predicts besides tokens
      (`FURTHER_LABELS`), auxiliary losses apart, with the collator `eval_collator`, and does not move the random
      generators: training is the same however often it is evaluated.
    - Weight decay leaves alone what components declare besides biases and norms: frequencies, spans, gates and the
      like.
    - Losses that are NaN or infinite, which Trainer leaves out of the mean that it logs, are counted as
      `non_finite_losses` and warned of; a checkpoint with such weights is not resumed.
    - Label smoothing shifts the labels of causal models of any family, and is refused where a model has losses besides
      that of its last logits (exits, further tokens).
    - Of checkpoints with equal metrics the one of the lowest held-out loss is the best, where Trainer takes the first.
    - `recipe`: what [`Recipe`] adds to Trainer's options. `terms`: what is added to the loss ([`LossTerms`]).
    - A checkpoint that is written over counts as incomplete until it is whole again, and saved configs keep their
      `use_cache` (Trainer switches it off for training).
    - `segment_streams=True` trains and evaluates models with segment memory on contiguous texts: the rows of the
      datasets follow each other, a batch continues the batch before it row by row ([`StreamSampler`]), and the memory
      is carried along ([`SegmentCarrier`]) and saved with checkpoints.
    - With it, a model whose memory has gradients (stack 'memformer') learns through all micro-batches of an
      optimizer's step, which are consecutive segments, by memory replay: as much memory as one micro-batch needs,
      and each is read twice.
    - `sequence_parallel=True` divides every text over all processes: a batch has `per_device_train_batch_size` rows,
      of which each process reads a part. `sequence_parallel=n` divides it over n of them, which have to be a divisor
      of their number; each n processes read other texts. What is learned is what one process learns on all texts.
    - `expert_parallel=True` splits the experts of a mixture over all processes, `expert_parallel=n` over each n of
      them, and shards all else (FSDP2); every process reads rows of its own. What is learned is what one process
      learns, but for the balance losses, which are those of a process's own rows.
    """

    def __init__(
        self,
        *args: Any,
        eval_collator: Callable | None = None,
        segment_streams: bool = False,
        recipe: Recipe | None = None,
        terms: LossTerms | None = None,
        sequence_parallel: bool | int = False,
        expert_parallel: bool | int = False,
        **kwargs: Any,
    ) -> None:
        self.recipe = recipe or Recipe()
        self._expert_parallel = expert_parallel
        model = kwargs.get("model", args[0] if args else None)
        self._use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        self.terms, self.term_means, self.aux_means = terms, Means(), Means()
        self._broken_losses: Tensor | None = None
        self._eval_targets = {}
        if "compute_metrics" not in kwargs and getattr(kwargs.get("args"), "batch_eval_metrics", False):
            raise ValueError(
                "`batch_eval_metrics` is for a `compute_metrics` of your own; what this trainer measures takes three"
                " numbers of each row, however many there are: leave it out."
            )
        kwargs.setdefault("compute_metrics", self._summarise)
        self.segments = SegmentCarrier() if segment_streams else None
        measured = model if kwargs.get("train_dataset") is None else None
        with only_measured(measured):
            super().__init__(*args, **kwargs)
        metric = self.args.metric_for_best_model or ""
        if is_error(metric) and not metric.endswith("loss"):  # for which Trainer knows
            self.args.greater_is_better = False
        config = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        if isinstance(config, XFormerConfig):
            check_sharding(config, sharding_in_force())
        if self.segments is not None:
            self.segments = carrier_of(config)
            self.add_callback(self.segments)
        self.eval_collator = eval_collator if eval_collator is not None else self.data_collator
        if (parts := processes_of("sequence_parallel", sequence_parallel, self.args.world_size)) > 1:
            self.sequence = SequenceParts(self, config, parts)
        if (parts := processes_of("expert_parallel", expert_parallel, self.args.world_size)) > 1:
            self.experts = ExpertParts(self, config, parts)
        if self.label_smoother is not None and self.compute_loss_func is None:
            inner = self.accelerator.unwrap_model(self.model)
            if has_further_losses(inner):
                raise ValueError(
                    "`label_smoothing_factor` makes the loss of a model's last logits, and"
                    f" {type(inner).__name__} learns from further ones; leave it out."
                )
            self.compute_loss_func = self._smoothed_loss
        if terms is not None:
            terms.begin(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if processes_of("expert_parallel", self._expert_parallel, self.args.world_size) > 1:
            return  # it may not fit whole: each process moves its share
        super()._move_model_to_device(model, device)

    # ------------------------------------------------------------------------------------------------ losses

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        model = self.accelerator.unwrap_model(self.model)
        prepare = getattr(model, "prepare_batch", None)
        if prepare is not None:  # what a model itself decides about its batch, such as an order of generation
            with self.compute_loss_context_manager():
                inputs = prepare(inputs)
        places, first = inputs.get("position_ids"), getattr(model.config, "first_position", 0)
        if isinstance(places, Tensor) and first:  # rows of data count from 0
            inputs = {**inputs, "position_ids": places + first}
        inputs = self._with_predicted_labels(inputs)
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and getattr(model.config, "labels_in_place", False):
            inputs.setdefault("shift_labels", pad(labels[:, 1:], (0, 1), value=-100))  # data has them like ids
        return inputs

    def _with_predicted_labels(self, batch: Any) -> Any:
        """A batch without labels that no token predicts: for losses that are not the model's, and for their count."""
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if isinstance(labels, Tensor) and isinstance(mask, Tensor) and self._predicts_next_token:
            return {**batch, "labels": labels_after_real_tokens(labels, mask)}
        return batch

    def _smoothed_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        epsilon = smoothing_among_all(
            self.args.label_smoothing_factor, logits.shape[-1], self.recipe.label_smoothing_support
        )
        smoother = LabelSmoother(epsilon=epsilon)
        return smoother(
            {"logits": logits}, labels, shift_labels=self._predicts_next_token, num_items_in_batch=num_items_in_batch
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:  # one that was given has parameters already, which sharding would replace
            keep_float32_in_shards(self.accelerator, self.model)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.recipe.vaswani_lr_scale is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        width = self.accelerator.unwrap_model(self.model).config.hidden_size
        warmup = self.args.get_warmup_steps(num_training_steps)
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = vaswani_schedule(optimizer, width, warmup, self.recipe.vaswani_lr_scale)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> Any:
        if self.sequence is not None:
            return self.sequence.give_whole(super().get_train_dataloader())
        if self.recipe.max_tokens is None:
            return super().get_train_dataloader()
        sampler = LengthGroupedBatchSampler(
            row_lengths(self.train_dataset),
            self.recipe.max_tokens,
            seed=data_seed(self.args),
            world_size=self.args.world_size,
        )
        return self.loader_of(read_columns(self, self.train_dataset), sampler)

    def loader_of(self, rows: Any, sampler: Any) -> Any:
        """Training batches as `sampler` has them, for as many processes as it was made for."""
        loader = torch.utils.data.DataLoader(
            rows,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
        )
        even = self.accelerator.even_batches
        self.accelerator.even_batches = False  # the number of batches is a multiple of the processes' already
        try:
            return self.accelerator.prepare(loader)
        finally:
            self.accelerator.even_batches = even  # evaluation wants as many batches in every process

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self.terms is not None and model.training:
            loss, outputs = self.terms.loss(self, model, inputs, num_items_in_batch)
        else:
            loss, outputs = self.compute_task_loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_task_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> tuple[Tensor, Any]:
        """The loss of a micro-batch as it counts in the step, without the terms besides it, and the outputs."""
        if self.segments is not None:
            inputs = self.segments.enter(inputs, model.training)
        labels = inputs.get("labels")  # which are taken out where the loss is made of logits
        dividing = contextlib.nullcontext() if self.sequence is None else self.sequence.dividing()
        with dividing:
            read = inputs if self.sequence is None else self.sequence.part(inputs)
            found = super().compute_loss(model, read, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss, outputs = found
        if self.sequence is not None and self._counts_over_devices(num_items_in_batch):
            loss = loss / self.sequence.count  # it is that of whole texts in every process
        if self.segments is not None:
            self.segments.leave(outputs, model.training)
            if model.training:
                loss = self.segments.loss(loss, outputs, partial(self._gradient_scale, num_items_in_batch))
        losses = outputs.get("aux_losses") if isinstance(outputs, dict) else None
        if losses and model.training:
            self.aux_means.add(losses)
            if self.compute_loss_func is not None:
                loss = loss + self._counted(sum(losses.values()), labels, num_items_in_batch)
        return loss, outputs

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Tensor | int | None]:
        batches, count = super().get_batch_samples(*args, **kwargs)
        if self.segments is not None:
            self.segments.begin(batches)
        return batches, count

    def _gradient_scale(self, num_items_in_batch: Tensor | int | None) -> float:
        """What to multiply the gradient of another micro-batch with, which backward passes scale once more."""
        scaler = getattr(self.accelerator, "scaler", None)
        scale = 1.0 / scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
        return (
            scale if self._counts_whole_step(num_items_in_batch) else scale * self.current_gradient_accumulation_steps
        )

    def _read_segment(self, segments: SegmentCarrier, model: nn.Module, batch: Any) -> None:
        """Reads a micro-batch and keeps the memory that it leaves."""
        model.train()
        with self.compute_loss_context_manager():
            segments.leave(model(**segments.enter(self._prepare_inputs(batch), True)), True)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        learn = partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        if self.segments is None:
            loss = learn(inputs)
        else:
            loss = self.segments.step(learn, partial(self._read_segment, self.segments, model), inputs)
        broken = (
            (~loss.detach().isfinite()).long().reshape(1)
        )  # read when losses are logged: asking now waits for the device
        self._broken_losses = broken if self._broken_losses is None else self._broken_losses + broken
        return loss

    def _counts_over_devices(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether Trainer multiplies a loss by the number of processes, which averaging gradients divides by."""
        return bool(self.args.average_tokens_across_devices and self._counts_whole_step(num_items_in_batch))

    def _counts_whole_step(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether the loss of a micro-batch is its share of the step's already."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return counts and num_items_in_batch is not None

    def _counted(self, mean: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None) -> Tensor:
        """A mean over a micro-batch, as the loss next to it counts in the step."""
        share = step_share(labels, num_items_in_batch, shifted=self._predicts_next_token)
        if share is None:
            return mean
        processes = self.accelerator.num_processes // self.get_tp_size() if self.args.n_gpu <= 1 else self.args.n_gpu
        return share.of(mean) * (processes if self.args.average_tokens_across_devices else 1)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        batch_samples[:] = [self._with_predicted_labels(batch) for batch in batch_samples]
        if self.sequence is not None:
            batch_samples[:] = [self.sequence.agreed(batch) for batch in batch_samples]
            self._leave_out_repeats(batch_samples)
            count = super()._get_num_items_in_batch(batch_samples, device)
            if count is None or not self._counts_over_devices(count):
                return count
            return torch.as_tensor(count) / self.sequence.count
        if self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            self._leave_out_repeats(batch_samples)
        return super()._get_num_items_in_batch(batch_samples, device)

    def _leave_out_repeats(self, batches: list) -> None:
        """Makes padding without labels of the rows that the last batch of an epoch has only so that every process has
        equally many: they count neither in a loss nor in a statistic."""
        labels = batches[-1].get("labels") if batches else None
        if not isinstance(labels, Tensor) or labels.ndim < 2 or not isinstance(self.train_dataset, Sized):
            return
        whole = self.args.dataloader_drop_last or not self.accelerator.gradient_state.end_of_dataloader
        readers = self._readers
        grouped = self.recipe.max_tokens is not None  # in batches of every row once
        if readers.count == 1 or self.segments is not None or grouped or whole:
            return
        rows = self._train_batch_size
        left_over = len(self.train_dataset) % (rows * readers.count)
        if not left_over or len(labels) != rows:
            return
        real = real_rows(rows, left_over, readers.index)
        if real < rows:
            batch = dict(batches[-1])
            if "input_ids" in batch:
                batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
            for ending, nothing in {"attention_mask": 0, "label": IGNORE_INDEX, "labels": IGNORE_INDEX}.items():
                for name in [name for name in batch if name.endswith(ending)]:
                    batch[name] = batch[name].clone()
                    batch[name][real:] = nothing
            batches[-1] = batch

    @property
    def rows_per_step(self) -> int | None:
        """Of all processes and micro-batches of an optimizer's step; None where tokens are counted (`max_tokens`)."""
        if self.recipe.max_tokens is not None:
            return None
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * self._readers.count

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        read = self.state.num_input_tokens_seen - before  # what every process has before it
        self.state.num_input_tokens_seen = before + read // self._readers.each

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for kind, means in {"aux": self.aux_means, "distill": self.term_means}.items() if "loss" in logs else ():
            logs |= {f"{kind}_{name}": mean for name, mean in means.take(self.accelerator.gather).items()}
        if "loss" in logs and self._broken_losses is not None:
            broken = int(self.accelerator.gather(self._broken_losses).sum())
            self._broken_losses = None
            if broken:  # Trainer leaves them out of the mean that it logs
                logs["non_finite_losses"] = broken
                logger.warning(
                    f"{broken} training losses up to step {self.state.global_step} were NaN or infinite and are not in"
                    " the loss that is logged: if that continues, the model has diverged; take a smaller learning"
                    " rate, clip gradients (`max_grad_norm`), or train in bf16 or fp32 in place of fp16."
                )
        super().log(logs, start_time)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)
        left_out = declared_undecayed(model)
        return [name for name in names if name not in left_out]

    # ------------------------------------------------------------------------------------------------ segments

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.segments is None:
            return super()._get_train_sampler(train_dataset)
        return self._stream_sampler(self.train_dataset if train_dataset is None else train_dataset, True)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if self.segments is None:
            return super()._get_eval_sampler(eval_dataset)
        return self._stream_sampler(eval_dataset, False)

    def _stream_sampler(self, dataset: Any, training: bool) -> StreamSampler:
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                "`segment_streams=True` needs a dataset of known length, to cut it into contiguous streams."
            )
        batch = self._train_batch_size if training else self.args.eval_batch_size
        return StreamSampler(len(dataset), batch * self.args.world_size, keep_all=not training)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns or []
        wanted = () if self.segments is None else (SEGMENT_START,)
        further = () if self.terms is None else self.terms.columns
        columns.extend(dict.fromkeys(name for name in (*wanted, *further) if name not in columns))
