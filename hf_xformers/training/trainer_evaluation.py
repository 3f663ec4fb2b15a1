# SPDX-License-Identifier: Apache-2.0
"""What a Trainer measures: losses and accuracies over all labeled tokens, compared with what their frequencies
reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_utils import EvalPrediction

from .evaluation import (
    IGNORE_INDEX,
    frequency_baseline,
    label_counts,
    scored,
    scored_beside,
    summarise,
    token_statistics,
)
from .head_pieces import head_left_out, reads_in_pieces, statistics_in_pieces
from .randomness import preserved_randomness
from .readers import Readers, gather_for_metrics
from .sequence_parts import SequenceParts, real_rows
from .trainer_files import KeepingTrainer

# Labels besides those of tokens, of rows or parts of these: what figures call them -> (label, scores of its classes).
FURTHER_LABELS = {
    "sentence": ("next_sentence_label", "seq_relationship_logits"),
    "order": ("reordering_labels", "reordering_logits"),
    "entity": ("entity_labels", "entity_logits"),
    "phrase": ("phrase_targets", "phrase_logits"),  # which the model made itself, as the next
    "masked_sentence": ("sentence_targets", "sentence_logits"),
}


def all_rows(prediction: EvalPrediction) -> np.ndarray:
    """What `prediction_step` gives in place of predictions, of all batches, [N, columns]."""
    rows = prediction.predictions
    return np.concatenate(rows) if isinstance(rows, list) else np.asarray(rows)


class MeasuringTrainer(KeepingTrainer):
    """Trainer that evaluates as [`XFormerTrainer`] says."""

    sequence: SequenceParts | None = None
    eval_collator: Any
    _eval_names: tuple[str, ...] = ()  # of the columns besides sums
    _eval_kinds: tuple[str, ...] = ()  # of labels besides those of tokens, with sums of their own
    _eval_targets: dict[str, Tensor]  # by type of label: how often each value is a target

    @property
    def _predicts_next_token(self) -> bool:
        model = self.accelerator.unwrap_model(self.model)
        return model.can_generate() and not model.config.is_encoder_decoder

    @property
    def _readers(self) -> Readers:
        together = self.get_tp_size() if self.sequence is None else self.sequence.count
        return Readers(self.args.world_size // together, self.args.process_index // together, together)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        with self._collating_for_evaluation():
            loader = super().get_eval_dataloader(eval_dataset)
        return loader if self.sequence is None else self.sequence.give_whole(loader)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        with self._collating_for_evaluation():
            loader = super().get_test_dataloader(test_dataset)
        return loader if self.sequence is None else self.sequence.give_whole(loader)

    @contextlib.contextmanager
    def _collating_for_evaluation(self) -> Iterator[None]:
        """Every row is measured: `dataloader_drop_last`, which Trainer applies to all loaders, is of training."""
        training, self.data_collator = self.data_collator, self.eval_collator
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            yield
        finally:
            self.data_collator, self.args.dataloader_drop_last = training, drop_last

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with preserved_randomness():
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._eval_targets = {}
        if self._readers.each > 1:  # Trainer takes its own again after the loop
            self.gather_function = partial(gather_for_metrics, self.accelerator, readers=self._readers)
        if self.segments is not None:
            self.segments.evaluation = None
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """In place of logits the sums of [`token_statistics`]: 3 numbers per row to gather, not length x
        vocabulary. Without labels, texts are read whole under `sequence_parallel` too."""
        if self.sequence is not None and "labels" in inputs:
            found = self._prediction_of_parts(self.sequence, model, self._prepare_inputs(inputs))
            return (found[0], None, None) if prediction_loss_only else found
        if prediction_loss_only or "labels" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        if self.segments is not None:
            inputs = self.segments.enter(inputs, training=False)
        next_token = self._predicts_next_token
        with torch.no_grad(), self.compute_loss_context_manager():
            if self._in_pieces(inputs):
                labels, inner = inputs["labels"], self.accelerator.unwrap_model(self.model)
                with head_left_out(inner) as states:
                    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
                vocab_size = outputs["logits"].shape[-1]
                rows = statistics_in_pieces(inner.lm_head, states[0], labels, vocab_size, next_token=next_token)
            else:
                outputs = model(**inputs)
                logits, labels = scored(outputs, inputs["labels"])
                vocab_size, classes = logits.shape[-1], logits.shape[:-1] == labels.shape
                if classes and not labels.is_floating_point():
                    rows = token_statistics(logits, labels, next_token=next_token)
                else:  # of numbers, or of a transcript: there is the loss alone
                    return outputs["loss"].mean().detach(), outputs["logits"], inputs["labels"]
        if self.segments is not None:
            self.segments.leave(outputs, training=False)
        self._count_targets("", labels, vocab_size, next_token=next_token)
        loss = rows[:, 0].sum() / rows[:, 1].sum().clamp(min=1)
        losses = outputs.get("aux_losses") or {}
        names = sorted(losses)
        columns = [losses[name].detach().float().mean().expand(len(rows), 1) for name in names]
        further = scored_beside(FURTHER_LABELS, outputs, inputs)
        for kind, (scores, wanted) in further.items():
            self._count_targets(f"{kind}_", wanted, scores.shape[-1])
        sums = [token_statistics(scores, wanted, next_token=False) for scores, wanted in further.values()]
        self._eval_names, self._eval_kinds = tuple(f"aux_{name}" for name in names), tuple(further)
        rows = torch.cat([rows, *sums, *columns], dim=1)
        return loss, rows, torch.zeros_like(rows[:, 0])  # Trainer wants labels besides predictions

    def _in_pieces(self, inputs: dict[str, Any]) -> bool:
        """Whether the logits of a batch are too many to be made at once, and need not be."""
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.get_tp_size() > 1
        if sharded or self.args.torch_compile or "shift_labels" in inputs:
            return False
        return reads_in_pieces(self.accelerator.unwrap_model(self.model), inputs["labels"].numel())

    def _prediction_of_parts(
        self, sequence: SequenceParts, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Tensor, Any, Any]:
        """[`prediction_step`] where every process reads a part of each text: all of a row have the sums of its
        texts."""
        inputs, loader = sequence.agreed(inputs), self.accelerator.gradient_state
        if loader.end_of_dataloader and loader.remainder > 0:
            labels = inputs["labels"].clone()
            labels[real_rows(len(labels), loader.remainder, sequence.replica) :] = IGNORE_INDEX
            inputs = {**inputs, "labels": labels}
        part = sequence.part(inputs)
        labels = sequence.targets(part, self._predicts_next_token)
        with torch.no_grad(), self.compute_loss_context_manager(), sequence.dividing():
            outputs = model(**part)
        logits, labels = scored(outputs, labels)
        rows = sequence.total(token_statistics(logits, labels, next_token=False))
        counts = sequence.total_of_all(label_counts(labels, logits.shape[-1], next_token=False))
        before = self._eval_targets.get("")
        self._eval_targets[""] = counts if before is None else before + counts
        loss = rows[:, 0].sum() / rows[:, 1].sum().clamp(min=1)
        self._eval_names, self._eval_kinds = (), ()
        return loss, rows, torch.zeros_like(rows[:, 0])

    def _count_targets(self, kind: str, labels: Tensor, vocab_size: int, *, next_token: bool = False) -> None:
        """Adds the targets of a batch on all processes, without the rows that only fill the last batch."""
        labels = self.accelerator.pad_across_processes(labels, dim=1, pad_index=IGNORE_INDEX)
        labels = gather_for_metrics(self.accelerator, labels, self._readers)
        counts = label_counts(labels, vocab_size, next_token=next_token)
        before = self._eval_targets.get(kind)
        if before is not None:  # a batch of fewer texts has fewer classes where these are its texts
            size = max(len(before), len(counts))
            before, counts = (torch.nn.functional.pad(each, (0, size - len(each))) for each in (before, counts))
            counts = before + counts
        self._eval_targets[kind] = counts

    def _summarise(self, prediction: EvalPrediction) -> dict[str, float]:
        if not self._eval_targets:  # nothing that was predicted is one of several classes
            return {}
        baselines = {
            name.replace("baseline_", f"baseline_{kind}"): value
            for kind, counts in self._eval_targets.items()
            for name, value in frequency_baseline(counts).items()
        }
        return {**summarise(all_rows(prediction), self._eval_names, self._eval_kinds), **baselines}
