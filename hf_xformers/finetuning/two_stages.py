# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning in two stages: on an intermediate task, then from its encoder on the target task (Phang et al. 2018,
arXiv 1811.01088, STILTs; Sun et al. 2019, arXiv 1905.05583, for more pretraining on texts of the task)."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conversion.provenance import carry_provenance
from ..core.saved_files import saving_into, weight_files
from ..training.checkpoints import newest_complete
from ..training.run import Run
from ..training.run_folder import read_summary
from .options import ModelOptions, RunOptions, TaskData, TaskOptions
from .run import FineTuning
from .tasks import task_class

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainingArguments, TrainerCallback

FIRST, ENCODER = "intermediate", "encoder"  # folders of the first stage, and in it of what the second starts from
_PROCESSOR = "preprocessor_config.json"


@dataclass
class IntermediateOptions:
    """A task to train on before the target task, in the folder `intermediate` of the run."""

    _argument_group_name = "intermediate task"

    intermediate_task: str | None = field(
        default=None,
        metadata={
            "help": (
                "Train on this task first, and then on --task from its encoder, with a new head, optimizer and"
                " schedule. Of language-modeling the objective is --objective."
            )
        },
    )
    intermediate_data: list[str] = field(
        default_factory=list, metadata={"help": "Its files, a folder or a Hub dataset id, as of --data."}
    )
    intermediate_epochs: float | None = field(
        default=None, metadata={"help": "Its epochs. Default: as of the target task."}
    )
    intermediate_steps: int | None = field(
        default=None, metadata={"help": "Its optimizer steps, in place of epochs. Default: as of the target task."}
    )
    intermediate_learning_rate: float | None = field(
        default=None, metadata={"help": "Its learning rate. Default: as of the target task."}
    )
    intermediate_text_column: str | None = field(
        default=None, metadata={"help": "Its columns, where usual names do not say: of the text (or words),"}
    )
    intermediate_text_pair_column: str | None = field(default=None, metadata={"help": "of a second text,"})
    intermediate_label_column: str | None = field(default=None, metadata={"help": "of the label (or tags)."})
    intermediate_column_names: list[str] = field(
        default_factory=list, metadata={"help": "Names of the columns of its files without a header line."}
    )

    def check(self) -> None:
        """Raises ValueError for values out of range, and for options without a task that they are of."""
        if self.intermediate_task is None:
            for entry in dataclasses.fields(self):
                if getattr(self, entry.name) not in (None, []):
                    raise ValueError(
                        f"--{entry.name} is of an intermediate task; name it with --intermediate_task, or leave the"
                        " option out"
                    )
            return
        if not self.intermediate_data:
            raise ValueError(
                f"--intermediate_task {self.intermediate_task} needs rows of its own; give --intermediate_data"
            )
        for name in ("intermediate_epochs", "intermediate_steps", "intermediate_learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} {value:g} must be above 0; leave it out for that of the target task")
        if self.intermediate_epochs is not None and self.intermediate_steps is not None:
            raise ValueError("--intermediate_epochs and --intermediate_steps both say how long; drop one")


class TwoStages:
    """Two runs of [`FineTuning`], the second from the encoder that the first one saved.

    The methods of `run` (adapters, layers that join, ensembles, ...) are of the target task alone. Both requests are
    checked, with their data, before anything is written.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        model: ModelOptions,
        source: TaskData,
        task: TaskOptions,
        run: RunOptions,
        args: Seq2SeqTrainingArguments,
        intermediate: IntermediateOptions,
        **options: Any,
    ) -> None:
        intermediate.check()
        self.model, self.source, self.task, self.run_options, self.args = model, source, task, run, args
        self.intermediate, self.options = intermediate, options
        self.this_run = Run(args)
        self.folder = self.this_run.folder
        self.first_folder = self.folder / FIRST
        self.encoder = self.first_folder / ENCODER
        self._resume_first, self._resume_second = self._places()
        self._first_done = self._resume_second is not None or (self.this_run.resumes and self._is_done())
        self.first = None if self._first_done else self._first_stage()
        if self.first is None:
            self._check_same_first()
        else:  # the request for the target task, as far as it can be checked before there is its encoder
            self._target(dataclasses.replace(model, new_head=True), None, **options)

    # ------------------------------------------------------------------------------------------------ resuming

    def _places(self) -> tuple[str | bool | None, str | bool | None]:
        """What each stage is resumed from: a folder, the newest checkpoint (True), or nothing."""
        value = self.args.resume_from_checkpoint
        if not self.this_run.resumes:
            return None, None
        if str(value).lower() in ("true", "yes", "1"):
            if self._is_done():
                return None, True if newest_complete(self.folder, self.args.world_size) else None
            if not self.first_folder.is_dir():
                raise ValueError(
                    f"{str(self.folder)!r} holds no intermediate stage to resume; leave --resume_from_checkpoint out"
                    " to start the run"
                )
            return True if newest_complete(self.first_folder, self.args.world_size) else None, None
        of_first = Path(str(value)).absolute().parent == self.first_folder.absolute()
        return (value, None) if of_first else (None, value)

    def _is_done(self) -> bool:
        return (self.encoder / "config.json").is_file() and bool(weight_files(self.encoder))

    def _check_same_first(self) -> None:
        if not self._is_done():
            raise ValueError(
                f"{str(self.encoder)!r} is not there, which the second stage starts from; resume with"
                " --resume_from_checkpoint alone, or start a new run in another --output_dir"
            )
        before = read_summary(self.first_folder)
        wanted = {"task": task_class(str(self.intermediate.intermediate_task)).id, "data": self._first_source().data}
        found = {"task": before.get("task"), "data": (before.get("dataset") or {}).get("data")}
        for name, value in wanted.items():
            if value != found[name]:
                raise ValueError(
                    f"the intermediate stage of {str(self.folder)!r} had {name} {found[name]!r}, and this command"
                    f" gives {value!r}; resume with the same --intermediate_{name}, or start a new run in another"
                    " --output_dir"
                )

    # ------------------------------------------------------------------------------------------------ the stages

    def _first_source(self) -> TaskData:
        return dataclasses.replace(
            self.source,
            data=self.intermediate.intermediate_data,
            validation_data=[],
            test_data=[],
            data_config=None,
            column_names=self.intermediate.intermediate_column_names,
        )

    def _first_stage(self) -> FineTuning:
        wanted = self.intermediate
        kind = task_class(str(wanted.intermediate_task))
        args = copy.copy(self.args)
        args.output_dir = str(self.first_folder)
        args.resume_from_checkpoint = self._resume_first  # type: ignore[assignment]
        if wanted.intermediate_epochs is not None:
            args.num_train_epochs, args.max_steps = wanted.intermediate_epochs, -1
        if wanted.intermediate_steps is not None:
            args.max_steps = wanted.intermediate_steps
        if wanted.intermediate_learning_rate is not None:
            args.learning_rate = wanted.intermediate_learning_rate
        if args.metric_for_best_model is not None:
            args.metric_for_best_model = kind.metric
            args.greater_is_better = not kind.is_error(kind.metric)
        task = TaskOptions(
            task=str(wanted.intermediate_task),
            text_column=wanted.intermediate_text_column,
            text_pair_column=wanted.intermediate_text_pair_column,
            label_column=wanted.intermediate_label_column,
            max_length=self.task.max_length,
            objective=self.task.objective,
        )
        run = RunOptions(overwrite_output_dir=self.run_options.overwrite_output_dir)
        given = {name: value for name, value in self.options.items() if name != "peft_fields"}
        return FineTuning(self.model, self._first_source(), task, run, args, **given)

    def _target(self, model: ModelOptions, resume: Any, **options: Any) -> FineTuning:
        args = copy.copy(self.args)
        args.resume_from_checkpoint = resume
        return FineTuning(model, self.source, self.task, self.run_options, args, **options)

    def train(
        self, say: Callable[[str], None] = lambda text: None, callbacks: Sequence[TrainerCallback] = ()
    ) -> dict[str, Any]:
        """Both stages, or what is left of them; the content of the second one's `training_summary.json`."""
        if self.first is not None:
            prepared = self.first.prepare()
            self._target(dataclasses.replace(self.model, new_head=True), None, **self.options).prepare()
            say(f"stage 1 of 2: {prepared.task.id}, {prepared.sizes} rows")
            if prepared.checkpoint is not None:
                say(f"resuming from {prepared.checkpoint}")
            if self.args.should_save and prepared.checkpoint is None:
                shutil.rmtree(self.encoder, ignore_errors=True)  # of an earlier run
            self.first.train(prepared, callbacks)
            if self.args.should_save:
                save_encoder(self.first_folder, self.encoder)
            self.this_run.wait()
        model = ModelOptions(model=str(self.encoder))
        peft = {name: value for name, value in self.options.items() if name == "peft_fields"}
        second = self._target(model, self._resume_second, **peft)
        prepared = second.prepare()
        prepared.plan["intermediate"] = _figures(read_summary(self.first_folder))
        say(f"stage 2 of 2: {prepared.task.id}, {prepared.sizes} rows")
        if prepared.checkpoint is not None:
            say(f"resuming from {prepared.checkpoint}")
        return second.train(prepared, callbacks)


def save_encoder(folder: Path, target: Path) -> None:
    """Writes the base model of a trained model and its tokenizer, without the head and without anything that the
    head's task did not train."""
    from ..data import load_tokenizer
    from .loading import load_trunk

    model, left_out = load_trunk(str(folder))
    kept = {name: value for name, value in model.state_dict().items() if name not in left_out}
    model.config.problem_type = None
    model.config.num_labels = 2  # names of classes belong to the head
    target.mkdir(exist_ok=True)
    with saving_into(target) as staging:
        if (folder / "tokenizer_config.json").is_file():
            load_tokenizer(str(folder)).save_pretrained(staging)
        if (folder / _PROCESSOR).is_file():
            (staging / _PROCESSOR).write_bytes((folder / _PROCESSOR).read_bytes())
        model.save_pretrained(staging, state_dict=kept)
    carry_provenance(str(folder), target)


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("task", "steps", "epochs", "init_from", "train_rows")
    return {
        name: value
        for name, value in summary.items()
        if name in kept or name.startswith(("eval_", "test_", "baseline_"))
    }
