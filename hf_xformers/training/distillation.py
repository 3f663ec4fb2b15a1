# SPDX-License-Identifier: Apache-2.0
"""Training with a teacher: a frozen model whose predictions and states the student follows next to its own
objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..core.chunked_loss import divergence_of_chosen
from ..core.given_options import refuse_alone
from .building import longest_input
from .loss_terms import LossTerms, Term
from .partial_checkpoints import share_frozen
from .trainer import XFormerTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..configuration_xformer import XFormerConfig


@dataclass
class Distillation:
    """The loss becomes task + logit_weight * t^2 * KL(teacher || student) + hidden_weight * state error, t the
    temperature.

    KL is that of the predictions at temperature t, a mean over labeled tokens (Hinton et al. 2015, arXiv 1503.02531,
    section 2). The state error is the mean over layers of |student - teacher|^2 / |teacher|^2 at real tokens, the
    states before the first layer included.
    """

    _argument_group_name = "teacher"

    teacher: str | None = field(
        default=None,
        metadata={
            "help": "Model to learn from besides the objective: the source of a swap, say. A folder or a Hub id."
        },
    )
    logit_weight: float = field(default=1.0, metadata={"help": "Weight of the teacher's predictions in the loss."})
    temperature: float = field(default=1.0, metadata={"help": "Softens both predictions before they are compared."})
    hidden_weight: float = field(default=0.0, metadata={"help": "Weight of the teacher's hidden states in the loss."})

    def check(self) -> None:
        """Raises `ValueError` for weights that are negative, a temperature that is not positive, or nothing to
        learn."""
        for name in ("logit_weight", "hidden_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must not be negative, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"--temperature must be above 0, got {self.temperature}")
        if self.teacher is None:
            refuse_alone(self, ("logit_weight", "temperature", "hidden_weight"), "--teacher")
        if self.teacher is not None and self.logit_weight == self.hidden_weight == 0:
            raise ValueError("a --teacher with --logit_weight 0 and --hidden_weight 0 teaches nothing; leave it out")


def open_teacher(settings: Distillation, config: XFormerConfig, head: str, block_size: int) -> PreTrainedModel:
    """The teacher for a student of configuration `config`, frozen. head: of both, e.g. `ForMaskedLM`; block_size:
    tokens of a row.

    Raises:
        ValueError: it cannot be read, predicts other tokens, is too short, or has states that cannot be compared.
    """
    from ..conversion.swap import open_model

    apart = ("ForReplacedTokenPreTraining",)  # each model reads tokens of its own making
    if head in (*apart, *(("ForPreTraining", "ForTextContrast") if settings.logit_weight else ())):
        raise ValueError(
            f"--teacher compares what two models predict of one text, for which {head} is not made; take another"
            " --objective, or train without --teacher"
        )
    name = settings.teacher
    model, untrained = open_model(str(name), head)
    if untrained and settings.logit_weight:
        raise ValueError(
            f"the teacher {name!r} has no trained {sorted(untrained)[0]!r}, so that its predictions are noise; take a"
            f" checkpoint with a {head.removeprefix('For')} head, or --logit_weight 0 and --hidden_weight above 0"
        )
    theirs = cast("XFormerConfig", model.config)
    if theirs.vocab_size != config.vocab_size:
        raise ValueError(
            f"the teacher {name!r} predicts {theirs.vocab_size} tokens and the student {config.vocab_size}; take the"
            " model that the student was made from, or another with its tokenizer"
        )
    limit = longest_input(theirs)
    if limit is not None and block_size > limit:
        raise ValueError(
            f"rows of --block_size {block_size} are too long for the teacher {name!r}, which reads {limit} tokens;"
            " shorten --block_size, or train without --teacher"
        )
    if settings.hidden_weight:
        depths, depths_of_theirs = (
            [view.num_hidden_layers for view in each.tower_configs()] for each in (config, theirs)
        )
        for what, own, other in (
            ("hidden size", config.hidden_size, theirs.hidden_size),
            ("layers", depths, depths_of_theirs),
        ):
            if own != other:
                raise ValueError(
                    f"--hidden_weight compares state with state, but the teacher {name!r} has {what} {other} and the "
                    f"student {own}; leave it at 0"
                )
    return model.requires_grad_(False).eval()


def refuse_other_tokens(teacher: str, student: str) -> None:
    """Refuses a teacher for whom the ids of the student's rows are other tokens. teacher, student: folders or Hub ids
    of tokenizers; a teacher may come without one.

    Raises:
        ValueError: an id is one token to the student and another to the teacher.
    """
    from ..data import load_tokenizer

    try:
        theirs = load_tokenizer(teacher).get_vocab()
    except ValueError:
        return
    own = {index: token for token, index in load_tokenizer(student).get_vocab().items()}
    odd = next((index for token, index in sorted(theirs.items()) if own.get(index, token) != token), None)
    if odd is not None:
        there = next(token for token, index in theirs.items() if index == odd)
        raise ValueError(
            f"the teacher {teacher!r} reads other tokens than the student (id {odd} is {there!r} to it and"
            f" {own[odd]!r} to the student), so that one row cannot be given to both; take the model that the student"
            " was made from, or another with its tokenizer"
        )


class TeacherTerms(LossTerms):
    """The two terms of a [`Distillation`]: `logits`, over the labeled tokens of the step, and `states`."""

    def __init__(self, teacher: PreTrainedModel, settings: Distillation) -> None:
        self.teacher, self.settings = teacher, settings

    def begin(self, trainer: Any) -> None:
        module: Any = self.teacher  # whose `to` is typed for models alone
        share_frozen(trainer.model, module.to(trainer.args.device))
        trainer.models_beside = [module]

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "output_hidden_states": True} if self.settings.hidden_weight else dict(inputs)

    def terms(self, trainer: Any, batch: dict[str, Any], outputs: Any, seen: Any) -> dict[str, Term]:
        settings, found = self.settings, {}
        if "labels" not in batch:
            return {}
        with torch.no_grad(), trainer.accelerator.autocast():
            taught = self.teacher(**self.given(batch))
        if settings.logit_weight:
            divergence, count = prediction_divergence(
                outputs["logits"],
                taught["logits"],
                batch["labels"],
                settings.temperature,
                next_token=trainer._predicts_next_token,
            )
            found["logits"] = Term(settings.logit_weight * divergence, count)
        if settings.hidden_weight:
            found["states"] = Term(settings.hidden_weight * state_error(outputs, taught, batch))
        return found


class DistillationTrainer(XFormerTrainer):
    """[`XFormerTrainer`] with a teacher; see [`Distillation`]. Its two terms are logged as `distill_logits` and
    `distill_states`, weighted as they enter the loss, means since the last log. Evaluation is without the teacher."""

    def __init__(self, *args: Any, teacher: PreTrainedModel, distillation: Distillation, **kwargs: Any) -> None:
        super().__init__(*args, terms=TeacherTerms(teacher, distillation), **kwargs)


def prediction_divergence(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, *, next_token: bool
) -> tuple[Tensor, Tensor]:
    """Sum over labeled tokens of t^2 KL(softmax(teacher / t) || softmax(student / t)) in nats, and their number.

    student, teacher [B, T, V]; labels [B, T], -100 where there is none; next_token: logits at t are for label t + 1.
    """
    if next_token:
        student, teacher, labels = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    chosen = labels != -100
    return temperature**2 * divergence_of_chosen(student, teacher, chosen, temperature), chosen.sum()


def state_error(student: Mapping[str, Any], teacher: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
    """Mean over layers (of both towers) of |student - teacher|^2 / |teacher|^2, over real tokens."""
    errors = []
    labels = inputs.get("labels")
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if student.get(name) is None:
            continue
        mask = inputs.get("attention_mask")
        if name == "decoder_hidden_states":
            mask = inputs.get("decoder_attention_mask", None if labels is None else labels != -100)
        for own, other in zip(student[name], teacher[name], strict=True):
            own, other = own.float(), other.float()
            if mask is not None:
                keep = mask.bool().unsqueeze(-1)
                own, other = own * keep, other * keep
            errors.append((own - other).square().sum() / other.square().sum().clamp(min=1e-12))
    return torch.stack(errors).mean()
