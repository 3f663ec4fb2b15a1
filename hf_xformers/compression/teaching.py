"""Training a student beside its teacher: what is added to Trainer, and the learned maps that are no part of the
result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ..finetuning.trainer import TaskTrainer
from ..training.trainer import XFormerTrainer
from .methods import DistillationMethod, Pass
from .passes import asked, own_heads, teacher_pass
from .teacher_outputs import StoredOutputs

PROJECTIONS = "distillation_projections"  # the student's attribute while it learns
ROW = "teacher_row"  # the column that says which of the stored outputs belong to a row


@dataclass
class Teaching:
    """A frozen teacher, or its stored outputs, and how the student follows it."""

    method: DistillationMethod
    teacher: Any = None
    stored: StoredOutputs | None = None

    def attach(self, student: Any, teacher_config: Any, seed: int) -> None:
        """Gives the student the learned maps that the method needs. They are saved with checkpoints."""
        wanted = self.method.projections(student.config, teacher_config)
        if not wanted:
            return
        generator, maps = torch.Generator().manual_seed(seed), {}
        for name, (own, theirs) in wanted.items():
            maps[name] = skip_init(nn.Linear, own, theirs, bias=False)
            nn.init.normal_(maps[name].weight, std=own**-0.5, generator=generator)
        setattr(student, PROJECTIONS, nn.ModuleDict(maps).to(student.device, student.dtype))

    @staticmethod
    def detach(student: Any) -> None:
        """Takes them out again."""
        if hasattr(student, PROJECTIONS):
            delattr(student, PROJECTIONS)

    # What `training.pretraining.train` calls around a run.
    def put(self, model: Any) -> None:
        self.attach(model, self.teacher.config, 0)

    def merge(self, model: Any) -> None:
        self.detach(model)


class _Teaches:
    """Adds a method's terms to the loss. They are logged as `distill_<name>`, weighted as they enter it, means since
    the last log; evaluation is without the teacher. Each is a mean over a micro-batch."""

    def __init__(self, *args: Any, teaching: Teaching, **kwargs: Any) -> None:
        collator = kwargs.get("data_collator")
        if teaching.stored is not None and collator is not None:
            kwargs["data_collator"] = _WithRows(collator)
        super().__init__(*args, **kwargs)
        self.teaching = teaching
        me: Any = self
        if teaching.teacher is not None:
            teaching.teacher.to(me.args.device).requires_grad_(False).eval()
            me.models_beside = [teaching.teacher]
        self._terms: dict[str, Tensor] = {}
        self._term_batches = 0

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        me: Any = self
        if self.teaching.stored is not None and ROW not in (me._signature_columns or []):
            me._signature_columns = [*(me._signature_columns or []), ROW]

    @property
    def progress(self) -> float:
        me: Any = self
        return me.state.global_step / max(1, me.state.max_steps)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        me: Any = self
        given = {name: value for name, value in inputs.items() if name != ROW}
        if not model.training:
            return super().compute_loss(model, given, return_outputs, num_items_in_batch)  # type: ignore[misc]
        method, inner = self.teaching.method, me.accelerator.unwrap_model(me.model)
        batch = dict(given)  # label smoothing takes labels out
        wanted = asked(method)
        with own_heads(method, inner, self._depths(inner)) as own:
            loss, outputs = super().compute_loss(  # type: ignore[misc]
                model, {**given, **wanted}, True, num_items_in_batch
            )
        taught, theirs = self._taught(batch, inputs.get(ROW), inner)
        seen = Pass(
            batch=batch,
            student=outputs,
            teacher=taught,
            config=inner.config,
            own_heads=own,
            taught_heads=theirs,
            projections=getattr(inner, PROJECTIONS, {}),
            progress=self.progress,
            next_token=me._predicts_next_token and "logits" in outputs and outputs["logits"].ndim == 3,
        )
        terms = method.terms(seen)
        whole = me._counts_whole_step(num_items_in_batch)  # else Trainer divides by the number of micro-batches
        share = 1.0 / me.current_gradient_accumulation_steps if whole else 1.0
        for name, term in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + term.detach().float()
        self._term_batches += 1
        loss = method.task_share(self.progress) * loss + share * sum(terms.values())
        return (loss, outputs) if return_outputs else loss

    def _depths(self, student: Any) -> tuple[int, int]:
        teacher = self.teaching.teacher
        depth = student.config.num_hidden_layers
        return depth, depth if teacher is None else teacher.config.num_hidden_layers

    def _taught(self, batch: Mapping[str, Any], rows: Tensor | None, student: Any) -> tuple[Mapping[str, Any], Any]:
        if self.teaching.stored is not None and rows is not None:
            return self.teaching.stored.batch(rows, batch.get("attention_mask"), student.device), {}
        me: Any = self
        with me.accelerator.autocast():
            return teacher_pass(self.teaching.method, self.teaching.teacher, batch, self._depths(student))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        me: Any = self
        if "loss" in logs and self._term_batches:
            for name, total in sorted(self._terms.items()):
                mean = (total / self._term_batches).reshape(1)
                logs[f"distill_{name}"] = me.accelerator.gather(mean).mean().item()
            self._terms, self._term_batches = {}, 0
        super().log(logs, start_time)  # type: ignore[misc]


class TextStudent(_Teaches, XFormerTrainer):
    """[`XFormerTrainer`] with a teacher."""


class TaskStudent(_Teaches, TaskTrainer):
    """[`TaskTrainer`] with a teacher."""


class _WithRows:
    """A collator that hands the number of each row on."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["collator"], name)

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [feature.get(ROW) for feature in features]
        batch = self.collator([{k: v for k, v in feature.items() if k != ROW} for feature in features])
        return {**batch, ROW: torch.tensor(rows)} if None not in rows else dict(batch)


def probe(method: DistillationMethod, student: Any, teacher: Any) -> None:
    """Runs both models on a few tokens and refuses what the method cannot compare.

    Raises:
        ValueError: other numbers of states, of tokens or of labels; attention that hands out nothing.
    """
    if method.generates or method.replaces or not hasattr(student, "config"):
        return
    method.check(student, teacher)
    ids = torch.arange(8).remainder(min(student.config.vocab_size, teacher.config.vocab_size)).expand(2, 8)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if student.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    depths = student.config.num_hidden_layers, teacher.config.num_hidden_layers
    training, attached = student.training, hasattr(student, PROJECTIONS)
    student.eval()
    if not attached:
        Teaching(method).attach(student, teacher.config, 0)
    try:
        with torch.no_grad():
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
        student.train(training)
        if not attached:
            Teaching.detach(student)


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


__all__ = ["PROJECTIONS", "ROW", "TaskStudent", "Teaching", "TextStudent", "probe"]
