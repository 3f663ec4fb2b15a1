# SPDX-License-Identifier: Apache-2.0
"""Training a student next to its teacher: what is added to Trainer, and the learned maps that are no part of the
result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import skip_init

from ..core.evaluating import evaluating
from ..modeling.classifiers import XFormerForMultipleChoice
from ..modeling.replaced_token_pretraining import XFormerForReplacedTokenPreTraining
from ..training.loss_terms import LossTerms, Term, progress_of
from .methods import DistillationMethod, Pass
from .passes import asked, own_heads, teacher_pass
from .teacher_outputs import StoredOutputs

PROJECTIONS = "distillation_projections"  # the student's attribute while it learns
ROW = "teacher_row"  # the column that says which of the stored outputs belong to a row


@dataclass
class Teaching(LossTerms):
    """A frozen teacher, or its stored outputs, and how the student follows it: the terms of a method, each a mean over
    a micro-batch."""

    method: DistillationMethod
    teacher: Any
    stored: StoredOutputs | None = None

    # What a run puts into a model while it trains.
    def put(self, model: Any) -> None:
        """Gives the student the learned maps that the method needs. They are saved with checkpoints."""
        wanted = self.method.projections(model.config, self.teacher.config)
        if not wanted:
            return
        generator, maps = torch.Generator().manual_seed(0), {}
        for name, (own, theirs) in wanted.items():
            maps[name] = skip_init(nn.Linear, own, theirs, bias=False)
            nn.init.normal_(maps[name].weight, std=own**-0.5, generator=generator)
        setattr(model, PROJECTIONS, nn.ModuleDict(maps).to(model.device, model.dtype))

    def merge(self, model: Any) -> None:
        """Takes them out again."""
        if hasattr(model, PROJECTIONS):
            delattr(model, PROJECTIONS)

    # What it adds to the loss.
    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.stored is None else (ROW,)

    def begin(self, trainer: Any) -> None:
        if self.stored is not None:
            trainer.data_collator = _WithRows(trainer.data_collator)
        self.teacher.to(trainer.args.device).requires_grad_(False).eval()
        trainer.models_beside = [self.teacher]

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in inputs.items() if name != ROW}, **asked(self.method)}

    def watching(self, model: Any) -> Any:
        return own_heads(self.method, model, self._depths(model))

    def task_share(self, progress: float) -> float:
        return self.method.task_share(progress)

    def terms(self, trainer: Any, batch: dict[str, Any], outputs: Any, seen: Any) -> dict[str, Term]:
        found: tuple[Mapping[str, Any], Any]
        inner = trainer.accelerator.unwrap_model(trainer.model)
        if self.stored is not None:
            found = self.stored.batch(batch.pop(ROW), batch.get("attention_mask"), inner.device), {}
        else:
            with trainer.accelerator.autocast():
                found = teacher_pass(self.method, self.teacher, batch, self._depths(inner))
        both = Pass(
            batch=batch,
            student=outputs,
            teacher=found[0],
            config=inner.config,
            own_heads=seen,
            taught_heads=found[1],
            projections=getattr(inner, PROJECTIONS, {}),
            progress=progress_of(trainer),
            next_token=trainer._predicts_next_token and "logits" in outputs and outputs["logits"].ndim == 3,
        )
        return {name: Term(value) for name, value in self.method.terms(both).items()}

    def _depths(self, student: Any) -> tuple[int, int]:
        return student.config.num_hidden_layers, self.teacher.config.num_hidden_layers


@dataclass
class _WithRows:
    """A collator of training rows that passes on the number of each."""

    collator: Any

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        rows = torch.tensor([feature[ROW] for feature in features])
        return {**self.collator([{k: v for k, v in feature.items() if k != ROW} for feature in features]), ROW: rows}


def probe(method: DistillationMethod, student: Any, teacher: Any) -> None:
    """Runs both models on a few tokens and refuses what the method cannot compare.

    Raises:
        ValueError: other numbers of states, of tokens or of labels; attention that hands out nothing.
    """
    if method.generates or method.replaces:
        return
    if isinstance(student, XFormerForReplacedTokenPreTraining):
        raise ValueError(
            f"method {method.type!r} compares two models of one text, and {type(student).__name__} puts other tokens"
            " into its own; take --method theseus, or distill a task of the teacher (--task)"
        )
    method.check(student, teacher)
    views = [view for model in (student, teacher) for view in model.config.tower_configs()]
    ids = torch.arange(8).remainder(min(view.vocab_size for view in views)).expand(2, 8)
    if isinstance(student, XFormerForMultipleChoice):
        ids = ids[:, None]
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if student.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    depths = student.config.num_hidden_layers, teacher.config.num_hidden_layers
    teaching = Teaching(method, teacher)
    teaching.put(student)
    try:
        with torch.no_grad(), evaluating(student):
            with own_heads(method, student, depths) as own:
                ours = student(**batch, **asked(method))
            taught, theirs = teacher_pass(method, teacher, batch, depths)
            _check_states(method, ours, taught, depths)
            for pair in method.layers(*depths).items():
                _check_heads(method, pair, own, theirs, student, teacher)
            seen = Pass(
                {**batch, "labels": None},
                ours,
                taught,
                student.config,
                own,
                theirs,
                getattr(student, PROJECTIONS, {}),
                next_token=False,
            )
            method.terms(seen)
    finally:
        teaching.merge(student)


def _check_states(method: DistillationMethod, own: Any, taught: Any, depths: tuple[int, int]) -> None:
    if not method.reads_states:
        return
    for who, found, depth in (("student", own, depths[0]), ("teacher", taught, depths[1])):
        states = found.get("hidden_states")
        if states is None or len(states) != depth + 1:
            count = 0 if states is None else len(states)
            raise ValueError(
                f"method {method.type!r} compares the states before and after each layer, and the {who} of"
                f" {depth} layers gives {count}; take --method distilbert with --method.cosine_weight 0"
            )
    lengths = {tuple(state.shape[:2]) for found in (own, taught) for state in found["hidden_states"]}
    if len(lengths) > 1:
        raise ValueError(
            f"method {method.type!r} compares states token by token, and one of the models changes the length of the"
            " text between its layers; take --method distilbert with --method.cosine_weight 0"
        )


def _check_heads(
    method: DistillationMethod, pair: tuple[int, int], own: Any, theirs: Any, student: Any, teacher: Any
) -> None:
    for who, index, found, model in (("student", pair[0], own, student), ("teacher", pair[1], theirs, teacher)):
        heads = found.get(index)
        if heads is None or any(getattr(heads, part) is None for part in method.attention):
            name = model.config.layer(index).attention.type
            raise ValueError(
                f"method {method.type!r} compares attention, of which {name!r} of the {who} hands out no"
                f" {' and '.join(method.attention)}; take --method distilbert, pkd or sequence_level"
            )
