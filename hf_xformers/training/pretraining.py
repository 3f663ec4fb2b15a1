# SPDX-License-Identifier: Apache-2.0
"""Pretraining from start to finish: data, tokenizer, configuration, model, Trainer, results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack, runtime_checkable

from ..core.finite import refuse_non_finite
from ..core.saved_files import STATE_FILE
from .building import build_model
from .checkpoints import misfit
from .preparation import Further, ModelChoice, Preparation, Prepared, head_class, rows_of
from .recipe import Recipe
from .run import Run
from .run_folder import saved_config
from .text import TextData

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

    from .merged_adapters import PutIn


@runtime_checkable
class PreparesTraining(Protocol):
    """A module that makes something of the rows before a training that starts from nothing."""

    def prepare_training(self, model: PreTrainedModel, counts: Callable[[], Tensor] | None) -> None:
        """model: around it. counts: makes how often each id occurs, [V]; None: that is not known."""


def prepare_modules(model: PreTrainedModel, counts: Callable[[], Tensor] | None) -> None:
    """Asks all modules that prepare themselves."""
    for module in model.modules():
        if isinstance(module, PreparesTraining):
            module.prepare_training(model, counts)


def train(
    prepared: Prepared,
    args: TrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
    make_trainer: Callable[..., Any] | None = None,
    adapters: PutIn | None = None,
    last: bool = True,
    recipe: Recipe | None = None,
    partial: bool = False,
    devices: Mapping[str, bool | int] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and saves; returns the content of `training_summary.json`. Resumes from `prepared.checkpoint`
    where there is one.

    Args:
        callbacks: further Trainer callbacks.
        make_trainer: a subclass of `XFormerTrainer`, or what calls one.
        adapters: adapters to inject, train (with the model or alone) and merge before saving.
        last: whether to tear down the process group afterwards.
        recipe: further options of training.
        partial: checkpoints hold a part of the model ([`TrainedAlone`]), the rest is that of `init_from`.
        devices: options of the trainer that divide the run over processes (`sequence_parallel`, `expert_parallel`).
    """
    from .callbacks import EpochCallback, ExactSaves
    from .trainer import XFormerTrainer

    recipe = recipe or Recipe()
    recipe.check(args)
    if recipe.average_checkpoints and adapters is not None:
        raise ValueError("--average_checkpoints is of whole models; leave it or the adapters out")
    if recipe.max_tokens and prepared.plan["train_streams"] is not None:
        raise ValueError(
            "--max_tokens sorts rows by length, and streams need their order; add --segment_streams false"
        )
    if recipe.chosen():
        prepared.plan = {**prepared.plan, "recipe": recipe.chosen()}
    prepared.plan = {**prepared.plan, **(devices or {})}
    run = Run(args)
    run.checkpoint = prepared.checkpoint
    model = start_model(prepared, args, adapted=adapters is not None, partial=partial)
    if prepared.checkpoint is None:
        prepare_modules(model, _token_counts(prepared))
    run.put(adapters, model)
    if prepared.validation is None:
        if args.load_best_model_at_end:
            raise ValueError("--load_best_model_at_end needs validation text; raise --validation_fraction above 0")
        run.go_without_evaluation()
        args.eval_on_start = False
    if prepared.checkpoint is not None:
        args.eval_on_start = False  # the start was evaluated when it was the start
    collator = prepared.collator(args.seed)
    chosen: dict[str, Any] = {**({"recipe": recipe} if recipe.chosen() else {}), **(devices or {})}
    trainer = (make_trainer or XFormerTrainer)(
        model=model,
        args=args,
        data_collator=collator,
        eval_collator=collator.as_static(),
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        processing_class=prepared.tokenizer,
        callbacks=[EpochCallback(collator), ExactSaves(), run.timer, *callbacks],
        segment_streams=prepared.plan["train_streams"] is not None,
        **chosen,
    )
    size, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    facts = {"learning_rate": args.learning_rate, "rows_per_step": trainer.rows_per_step, "processes": args.world_size}
    part = {"trained_parameters": trained} if trained < size else {}
    run.begin(trainer, {**prepared.plan, "parameters": size, **facts, **part})
    has_weights = adapters is None and not partial
    run.fit(
        trainer,
        average=recipe.average_checkpoints,
        done=is_finished(prepared, args),
        has_weights=has_weights,
    )
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    up_to_date = evaluated and evaluated[-1]["step"] == trainer.state.global_step and not args.load_best_model_at_end
    up_to_date = up_to_date and not recipe.average_checkpoints
    if prepared.validation is not None and not up_to_date:
        trainer.evaluate()
    run.summary |= results(trainer.state.log_history)
    return run.finish(trainer, prepared.plan["init_from"], last=last)


def is_finished(prepared: Prepared, args: TrainingArguments) -> bool:
    """Whether the checkpoint to resume from is the end of the run. (Trainer would take one step more.)"""
    if prepared.checkpoint is None:
        return False
    state = json.loads((prepared.checkpoint / STATE_FILE).read_text())
    if args.max_steps > 0:
        return state["global_step"] >= args.max_steps
    # How many steps an epoch has is for the trainer to say: processes may share rows, and batches hold tokens.
    return state["global_step"] >= state["max_steps"] and state["epoch"] > args.num_train_epochs - 1e-6


def _token_counts(prepared: Prepared) -> Callable[[], Tensor] | None:
    """What counts how often each id of the vocabulary occurs in the rows to train on, [V]; None for a stream."""
    if rows_of(prepared.train) is None:
        return None

    def count() -> Tensor:
        import torch

        counts = torch.zeros(prepared.config.vocab_size, dtype=torch.long)
        for row in prepared.train:
            ids = torch.as_tensor(row["input_ids"])
            counts.index_add_(0, ids, torch.ones_like(ids))
        return counts

    return count


def start_model(
    prepared: Prepared, args: TrainingArguments, *, adapted: bool = False, partial: bool = False
) -> PreTrainedModel:
    """Fresh weights under the run's seed, or the weights of `init_from`, or those of a finished run. adapted: its
    checkpoints hold adapters, too, and are read when these are there. partial: they hold a part of the model."""
    Run(args).seed()
    import torch

    from ..conversion.quiet import quiet

    cls = head_class(prepared.config, prepared.objective)
    start = prepared.plan["init_from"]
    if is_finished(prepared, args) and not adapted and not partial:
        return cls.from_pretrained(prepared.checkpoint)
    if start is None or (prepared.checkpoint is not None and not partial):  # Trainer loads the weights of a checkpoint
        model = build_model(prepared.config, prepared.objective)
        if prepared.checkpoint is not None:  # which the run has trained in this type
            model.to(getattr(torch, saved_config(prepared.checkpoint).get("dtype") or "float32"))
        return model
    try:
        with quiet():  # what does not fit is refused below
            model, report = cls.from_pretrained(
                start, config=prepared.config, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--init_from {start!r} does not load into the model asked for ({str(error).splitlines()[0]}); leave out"
            " the options that change its shape"
        ) from error
    new = prepared.plan.get("new_head", ())
    wrong = misfit(
        report,
        lambda key: (
            key not in new and (key not in report["unexpected_keys"] or key.startswith(f"{cls.base_model_prefix}."))
        ),
    )
    if wrong:
        raise ValueError(
            f"the checkpoint {start!r} {wrong}; leave out options that change the model, or save the whole model again"
        )
    refuse_non_finite(model, str(start))
    return model


def results(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The losses of a run, and what was measured at its end, from Trainer's log."""
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluations = [entry for entry in history if "eval_loss" in entry]
    figures: dict[str, Any] = {"train_loss": losses[-1] if losses else None}
    for name in ("loss", "accuracy"):  # of what a run starts from, where it was evaluated
        if evaluations and evaluations[0]["step"] == 0 and f"eval_{name}" in evaluations[0]:
            figures[f"start_{name}"] = evaluations[0][f"eval_{name}"]
    if evaluations:
        last = evaluations[-1]
        figures |= {
            key: value for key, value in last.items() if key.startswith("eval_") and not key.endswith("_per_second")
        }
    return figures


def pretrain(
    choice: ModelChoice,
    source: TextData,
    args: TrainingArguments,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    **further: Unpack[Further],
) -> dict[str, Any]:
    """[`Preparation`] and [`train`] in one call; what `hf-xformers pretrain` does."""
    preparation = Preparation(choice, source, args, **further)
    with preparation.this_run.lock():
        return train(preparation.run(), args, callbacks)
