# SPDX-License-Identifier: Apache-2.0
"""From a trained softmax model to one with a constant state, in stages: the swap, attention transfer, distillation,
LoRA.

swapped/                         the source with its new attention, before training
transfer/ distillation/ lora/    a stage each: a run as `uptrain` makes one, with its checkpoints and its model
linearization.json               settings, figures, and which stages are finished
model.safetensors, config.json, tokenizer.json, ...   the result: the model of the last stage

A finished stage keeps its account (training_summary.json, trainer_state.json): its checkpoints go, and the model that
it started from. At the end the result is the only model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from ..conversion.linearization import FILE, TITLES, Linearization, StageRecord, read_linearization
from ..conversion.swap import open_model, source_config, swap_checkpoint
from ..conversion.swap_config import layer_numbers, swapped_config
from ..core.saved_files import LOCK_FILE, STATE_FILE, SUMMARY_FILE, read_object, saving_into, write_json
from .building import language_objective, objective_of_shape
from .callbacks import MeasuringLines, Progress
from .checkpoints import checkpoints
from .distillation import DistillationTrainer, open_teacher
from .earlier_stages import put_aside, put_back
from .linearizing_options import STAGES, Linearizing
from .merged_adapters import MergedLora
from .partial_checkpoints import TrainedAlone, share_frozen
from .preparation import ModelChoice, Preparation, Prepared
from .pretraining import start_model, train
from .run import Run
from .run_folder import refuse_own_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

    from .text import TextData

SWAPPED = "swapped"
_ERROR_BATCHES = 4  # on which each layer's error is measured
# Of Trainer's settings, those that make other weights of the same rows.
_DECISIVE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay", "adam_beta1"),
    *("adam_beta2", "max_grad_norm", "lr_scheduler_type", "warmup_steps", "seed", "data_seed", "bf16", "fp16"),
)


Told = Callable[[str], None]


class Linearizer:
    """Checks a request and runs its stages; what can be refused is refused before anything is written.

    Args:
        attention: the component to put in, as a name or a dict.
        args: what stages have in common; steps and learning rates are each stage's own.
        objective_fields: settings of the objective.
        say: takes lines about the progress.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        choice: Linearizing,
        attention: str | Mapping[str, Any],
        source: TextData,
        args: TrainingArguments,
        *,
        objective_fields: Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        say: Told = lambda line: None,
    ) -> None:
        choice.check()
        if args.max_steps > 0:
            raise ValueError(
                f"--max_steps {args.max_steps} is for a single training; give --transfer_steps, --distillation_steps"
                " and --lora_steps"
            )
        if args.num_train_epochs != type(args).num_train_epochs:
            raise ValueError(
                f"--num_train_epochs {args.num_train_epochs:g} has no effect on stages, which count steps; give"
                " --transfer_steps, --distillation_steps and --lora_steps"
            )
        self.choice, self.attention, self.source, self.args = choice, attention, source, args
        self.objective_fields, self.callbacks, self.say = objective_fields, callbacks, say
        self.this_run = Run(args, overwrite=choice.overwrite_output_dir)
        self.this_run.refuse_named_checkpoint()
        self.folder = self.this_run.folder
        refuse_own_source(self.folder, choice.model, "--model", (SWAPPED, *STAGES))
        config = source_config(choice.model)
        if config.is_encoder_decoder:
            raise ValueError(
                f"{choice.model!r} is an encoder-decoder, whose two towers are not linearized; take an encoder or a"
                " decoder, or swap its attention with `hf-xformers convert` and train it with `hf-xformers uptrain`"
            )
        own = objective_of_shape("decoder" if config.is_decoder else "encoder")
        self.objective = choice.objective or own.type
        if language_objective(self.objective).shape != own.shape:
            raise ValueError(
                f"--objective {choice.objective} is not for the model {choice.model!r}, which is of the shape that"
                f" {own.type} trains; leave it out"
            )
        self.layers = layer_numbers("attention", choice.layers, config.num_hidden_layers)
        target = swapped_config(config, {"attention": attention}, {"attention": choice.layers})
        specs = [target.layer(index).attention for index in self.layers]
        same = [index for index, spec in zip(self.layers, specs) if spec.type == config.layer(index).attention.type]
        if same:
            raise ValueError(
                f"layer {same[0]} of {choice.model!r} has {specs[0].type!r} attention already; choose other layers"
                " (--layers), or another --attention"
            )
        if choice.transfer_loss == "weights" and not specs[0].weighs(target.layer(self.layers[0])):
            raise ValueError(
                f"--transfer_loss weights compares weights that sum to one, which attention {specs[0].type!r} does not"
                " have here; take --transfer_loss output"
            )
        plan = {
            **{k: v for k, v in dataclasses.asdict(choice).items() if k != "overwrite_output_dir"},
            "data": dataclasses.asdict(source),
            **{name: _plain(getattr(args, name)) for name in _DECISIVE},
        }
        self.record = Linearization(choice.model, specs[0].to_dict(), self.layers, plan)

    def run(self) -> Linearization:
        """Runs the stages that are not finished, and writes the result."""
        with self.this_run.lock():
            self._open()
            if self.record.status == "finished":
                self.say(f"{str(self.folder)!r} is finished already")
                self._clear(*STAGES)
                return self.record
            start, first = self.folder / SWAPPED, next(stage for stage in STAGES if self.choice.steps(stage))
            if not self.record.layer_errors:
                with self.this_run.in_place_of(FILE, (SWAPPED, *STAGES)):
                    with self.this_run.turns("linearizing"):
                        if self.this_run.writes:
                            self._write_swapped()
                    self._measure(self._prepare(start, first)[0])
            for stage in STAGES:
                if self.choice.steps(stage):
                    if self.record.stage(stage) is None:
                        self._train(stage, start)
                        self.this_run.wait()  # until nobody reads the model that the stage started from
                    self._clear(start.name)
                    if self.args.should_save:
                        for checkpoint in checkpoints(self.folder / stage):
                            shutil.rmtree(checkpoint)
                    start = self.folder / stage
            self._finish(start)
            self._clear(start.name)
        if self.args.world_size > 1:
            PartialState().destroy_process_group()
        return self.record

    # ------------------------------------------------------------------------------------------------ beginnings

    def _open(self) -> None:
        """Takes up the run that is in the folder, or makes room for a new one, which the main process does."""
        run = self.this_run
        with run.turns("linearizing"):
            if run.writes:
                self._make_room()
        before = read_linearization(self.folder) if run.resumes else None
        run.wait()  # the main process writes into the folder soon
        if before is not None:
            theirs, mine = (
                {"attention": one.attention, "layers": one.layers, **one.plan} for one in (before, self.record)
            )
            run.check_settings(theirs, mine)
            self.record = before

    def _make_room(self) -> None:
        put_back(self.folder, FILE, (SWAPPED, *STAGES))  # of a run that was stopped before it had begun
        if read_linearization(self.folder) is None:
            for name in (SWAPPED, *STAGES):
                if (self.folder / name).exists():
                    raise ValueError(
                        f"{str(self.folder / name)!r} is there already and of no linearization; take another"
                        " --output_dir"
                    )
        elif not self.this_run.resumes:
            self.this_run.refuse_loss("a linearization")
            put_aside(self.folder, FILE, (SWAPPED, *STAGES))

    def _write_swapped(self) -> None:
        self._write()
        report = swap_checkpoint(
            self.choice.model,
            self.folder / SWAPPED,
            overwrite=True,
            measure=False,
            attention=self.attention,
            layers={"attention": self.choice.layers},
        )
        self.say(
            f"{self.choice.model}: attention {self.record.attention['type']!r} in layers {self.choice.layers}; tensors"
            f" {len(report.kept)} kept, {len(report.derived)} derived, {len(report.new)} new"
        )

    def _prepare(self, start: Path, stage: str) -> tuple[Prepared, TrainingArguments]:
        """The run of one stage that starts from the model in `start`."""
        args = self.this_run.stage(
            stage,
            max_steps=self.choice.steps(stage) or 1,
            learning_rate=getattr(self.choice, f"{stage}_learning_rate") or self.args.learning_rate,
            seed=self.args.seed + STAGES.index(stage),  # other rows come first in each stage
        )
        if stage == "transfer":  # its loss is in no output, in which unused parameters are looked for
            args.ddp_find_unused_parameters = False
        model = ModelChoice(
            init_from=str(start),
            objective=self.objective,
            block_size=self.choice.block_size,
            segment_streams=False,
            overwrite_output_dir=True,
        )
        preparation = Preparation(model, self.source, args, objective_fields=self.objective_fields)
        if preparation.new_head:
            raise ValueError(
                f"{self.choice.model!r} has no head that predicts tokens (it lacks {preparation.new_head[0]!r}), so"
                " that there is nothing to learn from; train one first with `hf-xformers uptrain`, or take a"
                " checkpoint that has one"
            )
        return preparation.run(), args

    def _teacher(self, prepared: Prepared) -> PreTrainedModel:
        head = f"For{prepared.objective.head}"
        return open_teacher(self.choice.teaching(), prepared.config, head, prepared.plan["block_size"])

    def _measure(self, prepared: Prepared) -> None:
        """Losses of the source and of the swap, and each layer's error, before anything is trained."""
        args = copy.copy(self.args)
        args.resume_from_checkpoint = None
        swapped = start_model(dataclasses.replace(prepared, checkpoint=None), args).requires_grad_(False)
        source = self._teacher(prepared)
        share_frozen(swapped, source)
        if prepared.validation is not None:
            self.record.held_out_rows = prepared.plan["validation_rows"]
            named = (("the source's held-out loss", source), ("the swap's held-out loss", swapped))
            found = [_held_out(model, prepared, args, MeasuringLines(self.say, what)) for what, model in named]
            self.record.source_loss, self.record.swapped_loss = (metrics["eval_loss"] for metrics in found)
            self.record.baseline_loss = found[0].get("eval_baseline_loss")
            self.say(
                f"held-out loss {self.record.source_loss:.3f} of the source, {self.record.swapped_loss:.3f} after the"
                " swap"
            )
        self.record.layer_errors["swapped"] = self._errors(swapped, source, prepared)
        self._write()

    def _errors(self, model: PreTrainedModel, source: PreTrainedModel, prepared: Prepared) -> list[float]:
        from .attention_transfer import layer_errors

        rows = prepared.train if prepared.validation is None else prepared.validation
        collator = prepared.objective.collator(prepared.tokenizer, seed=self.args.seed).as_static()
        size = self.args.per_device_eval_batch_size
        taken = list(itertools.islice(rows, _ERROR_BATCHES * size))
        starts = range(0, len(taken), size)
        progress = Progress("each layer's error", len(starts), self.say)

        def batches() -> Iterator[dict[str, Any]]:
            for first in starts:
                yield collator(taken[first : first + size])
                progress.advance()

        return layer_errors(model, source, self.layers, batches())

    # ------------------------------------------------------------------------------------------------ stages

    def _train(self, stage: str, start: Path) -> None:
        prepared, args = self._prepare(start, stage)
        source = self._teacher(prepared)
        self.say(
            f"{TITLES[stage]}: {args.max_steps:,} steps, learning rate {args.learning_rate:g}, rows of"
            f" {prepared.plan['block_size']} tokens"
        )
        if prepared.checkpoint is not None:
            self.say(f"resuming from {prepared.checkpoint}")
        adapters = None
        if stage == "transfer":
            from .attention_transfer import AttentionTransferTrainer

            compared = self.choice.transfer_loss
            trainer: Any = functools.partial(
                AttentionTransferTrainer, source=source, layers=self.layers, loss=compared
            )
        else:
            taught = _LoraTrainer if stage == "lora" else DistillationTrainer
            trainer = functools.partial(taught, teacher=source, distillation=self.choice.teaching())
            if stage == "lora":
                adapters = MergedLora(self.choice.lora_rank, self.choice.lora_alpha)
        frozen = stage != "distillation"
        summary = train(
            prepared, args, self.callbacks, make_trainer=trainer, adapters=adapters, last=False, partial=frozen
        )
        self.this_run.wait()  # until the model is written
        trained = None
        if stage == "transfer":
            trained = open_model(self.folder / stage)[0].requires_grad_(False)
            share_frozen(trained, source)
            self.record.layer_errors["transfer"] = self._errors(trained, source, prepared)
        self.record.stages.append(
            StageRecord(
                name=stage,
                steps=summary["steps"],
                learning_rate=args.learning_rate,
                trained=summary.get("trained_parameters", summary["parameters"]),
                parameters=summary["parameters"],
                what=self._what(stage, trained, source),
                rows=summary["rows_per_step"],
                seconds=summary["seconds"],
                train_loss=summary["train_loss"],
                loss=summary.get("eval_loss"),
            )
        )
        self._write()

    def _what(self, stage: str, student: PreTrainedModel | None, source: PreTrainedModel) -> str:
        """What a stage trains, in words."""
        if stage == "distillation":
            return "all weights"
        if student is None:
            return f"adapters of rank {self.choice.lora_rank} on the attention's projections"
        from .attention_transfer import attention_pairs

        pair = attention_pairs(student, source, self.layers[:1])[0]
        chosen = {id(parameter) for parameter in pair.trained()}
        names = [name for name, parameter in pair.student.named_parameters() if id(parameter) in chosen]
        parts = dict.fromkeys(name.partition(".")[0] for name in names)
        return f"{', '.join(f'`{part}`' for part in parts)} of the attention"

    def _finish(self, last: Path) -> None:
        """The last stage's model into the folder, each file whole or not at all."""
        self.record.status = "finished"
        if not self.args.should_save:
            return
        with saving_into(self.folder) as staging:
            for path in last.iterdir():
                if path.is_file() and path.name not in (LOCK_FILE, STATE_FILE):
                    shutil.copy2(path, staging / path.name)
            account = read_object(last / SUMMARY_FILE)  # of the last stage, which started from the one before
            write_json(staging / SUMMARY_FILE, {**account, "init_from": self.choice.model, "seed": self.args.seed})
        self._write()

    # ------------------------------------------------------------------------------------------------ processes

    def _clear(self, *names: str) -> None:
        """Removes models that nothing starts from any more; stages keep their account."""
        for place in (self.folder / name for name in names if self.args.should_save):
            if place.name == SWAPPED:
                shutil.rmtree(place, ignore_errors=True)
            for path in place.iterdir() if place.is_dir() else ():
                if path.is_file() and path.name not in (SUMMARY_FILE, STATE_FILE):
                    path.unlink()

    def _write(self) -> None:
        if self.args.should_save:
            self.record.write(self.folder)


def _plain(value: Any) -> Any:
    """A setting as JSON keeps it."""
    return value if value is None or isinstance(value, (bool, int, float)) else str(getattr(value, "value", value))


class _LoraTrainer(TrainedAlone, DistillationTrainer):
    """Of adapters alone."""


def _held_out(
    model: PreTrainedModel, prepared: Prepared, args: TrainingArguments, lines: TrainerCallback
) -> dict[str, float]:
    """The metrics of a model on the held-out rows. lines: tells how far it is."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from .trainer import XFormerTrainer

    collator = prepared.objective.collator(prepared.tokenizer, seed=args.seed).as_static()
    trainer = XFormerTrainer(
        model=model,
        args=args,
        data_collator=collator,
        eval_dataset=prepared.validation,
        processing_class=prepared.tokenizer,
    )
    trainer.pop_callback(PrinterCallback)
    trainer.pop_callback(ProgressCallback)
    trainer.add_callback(lines)
    return trainer.evaluate()


def linearize(
    choice: Linearizing,
    attention: str | Mapping[str, Any],
    source: TextData,
    args: TrainingArguments,
    **options: Any,
) -> Linearization:
    """[`Linearizer`] in one call; what `hf-xformers linearize` does."""
    return Linearizer(choice, attention, source, args, **options).run()


__all__ = ["STAGES", "SWAPPED", "Linearizer", "Linearizing", "linearize"]
