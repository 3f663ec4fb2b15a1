# SPDX-License-Identifier: Apache-2.0
"""What every method of distillation shares: its contract, and errors of states and of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Tensor, nn

from ...core.specs import Catalog, Registry, TypedSpec, build_in, register_in
from ..heads import Heads, has_scores, self_attentions
from ..predictions import prediction_loss, widened

_REGISTRY: Registry[DistillationMethod] = Registry("method", "compression.methods", kind="distillation method")


@dataclass
class Pass:
    """One batch through both models.

    Args:
        batch: what the student was given.
        student, teacher: outputs by name.
        own_heads, taught_heads: by layer.
        progress: share of the run's steps that are done, 0 to 1.
        config: the student's.
        projections: learned maps from the student's widths to the teacher's, by name; a width that is the same has
            none.
    """

    batch: Mapping[str, Any]
    student: Mapping[str, Any]
    teacher: Mapping[str, Any]
    config: Any
    own_heads: Mapping[int, Heads] = dataclass_field(default_factory=dict)
    taught_heads: Mapping[int, Heads] = dataclass_field(default_factory=dict)
    projections: Mapping[str, nn.Module] | nn.ModuleDict = dataclass_field(default_factory=dict)
    progress: float = 0.0
    next_token: bool = False

    @property
    def mask(self) -> Tensor | None:
        """[B, T] boolean, True = real, or [B * C, T] of rows of several texts; None where nothing is padded."""
        mask = self.batch.get("attention_mask")
        return None if mask is None else mask.flatten(0, -2).bool()

    def states(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """States [B, T, D] of student and teacher: before the first layer, and after each."""
        return self.student["hidden_states"], self.teacher["hidden_states"]

    def projected(self, name: str, state: Tensor) -> Tensor:
        """A student's state in the teacher's width."""
        if name not in self.projections:
            return state
        return self.projections[name](state)

    def predictions(self, temperature: float, **options: Any) -> Tensor:
        """[`prediction_loss`] of this pass."""
        problem = getattr(self.config, "problem_type", None)
        if problem is None and self.student.get("logits") is not None and self.student["logits"].ndim == 2:
            problem = "regression" if self.student["logits"].shape[-1] == 1 else None
        return prediction_loss(
            self.student,
            self.teacher,
            self.batch,
            temperature=temperature,
            problem=problem,
            next_token=self.next_token,
            **options,
        )


class DistillationMethod(TypedSpec):
    """Base of the methods. `terms` gives what is added to the loss of the task, by name, weights included.

    Attributes:
        reads_states: it compares hidden states.
        attention: what of the heads it compares ('weights', 'scores', 'values').
        generates: the student learns from texts that the teacher writes, not from its passes.
        replaces: layers of the student take the place of the teacher's while they learn.
    """

    summary: ClassVar[str] = ""
    reads_states: ClassVar[bool] = False
    attention: ClassVar[tuple[str, ...]] = ()
    generates: ClassVar[bool] = False
    replaces: ClassVar[bool] = False

    def task_share(self, progress: float) -> float:
        """Weight of the task's own loss."""
        return 1.0

    def teaches_predictions(self) -> bool:
        """Whether the layers that predict learn from it, or from the task's loss."""
        return True

    def terms(self, seen: Pass) -> dict[str, Tensor]:
        return {}

    def layers(self, student: int, teacher: int) -> dict[int, int]:
        """Layers, from 0 on, whose attention is compared: the student's and the teacher's."""
        return {}

    def projections(self, student: Any, teacher: Any) -> dict[str, tuple[int, int]]:
        """The learned maps that these configurations need, by name: (student's width, teacher's)."""
        return {}

    def check(self, student: Any, teacher: Any) -> None:
        """Refuses models that this method cannot compare. Raises `ValueError` with the reason and the remedy."""
        own, theirs = student.config, teacher.config
        if (self.reads_states or self.attention) and own.is_encoder_decoder:
            raise ValueError(
                f"method {self.type!r} compares the layers of one tower, and the models are encoder-decoders; take"
                " --method sequence_level, or distilbert with --method.cosine_weight 0"
            )
        depths = own.num_hidden_layers, theirs.num_hidden_layers
        for mine, other in self.layers(*depths).items():
            self._check_attention(student, mine, teacher, other)

    def _check_attention(self, student: Any, mine: int, teacher: Any, other: int) -> None:
        others = "distilbert, pkd or sequence_level"
        heads = []
        for who, model, index in (("student", student, mine), ("teacher", teacher, other)):
            module = self_attentions(model).get(index)
            layer = model.config.layer(index)
            name = layer.attention.type
            if module is None:
                raise ValueError(
                    f"method {self.type!r} compares attention, and layer {index} of the {who} has none; take --method"
                    f" {others}"
                )
            if not layer.attention.weighs(layer):
                raise ValueError(
                    f"method {self.type!r} compares attention weights that sum to one, which attention {name!r} of the"
                    f" {who} does not have; take --method {others}"
                )
            if "scores" in self.attention and not has_scores(module):
                raise ValueError(
                    f"method {self.type!r} compares the scores under a softmax, which attention {name!r} of the"
                    f" {who}, with position {layer.position.type!r}, does not hand out; take --method minilm or"
                    f" mobilebert, which compare weights, or {others}"
                )
            heads.append(module.num_heads)
        if heads[0] != heads[1]:
            raise ValueError(
                f"method {self.type!r} compares head with head, and layer {mine} of the student has {heads[0]} where"
                f" layer {other} of the teacher has {heads[1]}; give the student as many"
                f" (--student.num_attention_heads {heads[1]}), or take --method {others}"
            )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(f"method {self.type!r}: {message}")


METHODS = Catalog(_REGISTRY)


@dataclass_transform(kw_only_default=True)
def register(name: str, *aliases: str):
    """Class decorator: makes `cls` a strict dataclass and registers it as the method `name`."""

    def wrap(cls: type[DistillationMethod]) -> type[DistillationMethod]:
        return register_in(_REGISTRY, cls, name, aliases)

    return wrap


def build_method(value: Any) -> DistillationMethod:
    """The method that a name, a dict with `type`, or a method itself stands for. Raises `ValueError` and `TypeError`
    as components do."""
    return build_in(_REGISTRY, value, "method")


# ------------------------------------------------------------------------------------------------ errors


def widths(name: str, student: Any, teacher: Any) -> dict[str, tuple[int, int]]:
    """One map from the student's states to the teacher's, where their widths differ."""
    own, theirs = student.hidden_size, teacher.hidden_size
    return {} if own == theirs else {name: (own, theirs)}


def mean_over_tokens(errors: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T] -> the mean over real tokens; mask [B, T] or None."""
    if mask is None or mask.shape != errors.shape:
        return errors.mean()
    return (errors * mask).sum() / mask.sum().clamp(min=1)


def state_error(own: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens and their numbers of (own - taught)^2: [B, T, D] twice."""
    return mean_over_tokens((widened(own) - widened(taught)).square().mean(-1), mask)


def weight_divergence(own: Tensor, taught: Tensor, real: Tensor | None) -> Tensor:
    """Mean over heads and real queries of KL(taught || own): rows [B, H, T, S] that sum to one; real [B, T]."""
    smallest = 1e-12
    own, taught = widened(own), widened(taught)
    found = (taught * (taught.clamp(min=smallest).log() - own.clamp(min=smallest).log())).sum(-1)
    return mean_over_tokens(found.mean(1), real)


def value_relation(heads: Heads) -> Tensor:
    """softmax(V V^T / sqrt(d)) over the tokens that each may see, [B, H, S, S]."""
    assert heads.values is not None  # seen to before the run
    values = widened(heads.values)
    scores = values @ values.mT / values.shape[-1] ** 0.5
    if heads.visible is None:
        return torch.softmax(scores, dim=-1)
    weights = torch.softmax(scores.masked_fill(~heads.visible, torch.finfo(scores.dtype).min), dim=-1)
    return weights.masked_fill(~heads.visible, 0.0)


def score_error(own: Heads, taught: Heads) -> Tensor:
    """Mean over heads and the pairs that real queries see of the squared difference of scores."""
    assert own.scores is not None and taught.scores is not None  # `check` has seen to it
    pairs = own.pairs(own.scores)
    difference = (own.scores - taught.scores.to(own.scores.dtype)).masked_fill(~pairs, 0.0)
    return difference.square().sum() / pairs.sum().clamp(min=1)
