# SPDX-License-Identifier: Apache-2.0
"""A distillation from start to finish: teacher, student, the run, the table.

student/             the student before it learns
teacher_outputs/     the teacher's outputs, where they are kept (`store_teacher`)
teacher_texts.jsonl  what the teacher has written (method `sequence_level`)
distillation.json    teacher, method and settings, which a resumed run must share
compression.json     the table before and after
model.safetensors, ...   the result, as `finetune` or `pretrain` leaves one
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..conversion.refusals import refuse_quantized
from ..conversion.swap import open_model
from ..conversion.transfer import carry_generation
from ..core.given_options import changed
from ..core.saved_files import SUMMARY_FILE, read_object, replacing, write_json
from ..modeling_base import XFormerPreTrainedModel
from ..training.building import longest_input
from ..training.checkpoints import newest_complete
from ..training.earlier_stages import put_aside, put_back
from ..training.preparation import ModelChoice, Preparation, Prepared
from ..training.pretraining import train
from ..training.run import Run
from ..training.run_folder import read_summary, refuse_own_source
from ..training.scoring import choose_objective, load_config, training_of
from ..training.trainer import XFormerTrainer
from .distilling_options import Distilling, OnText
from .methods import DistillationMethod, build_method
from .report import Measuring, Row, compare, measure, refuse_adapter, refuse_processes, write_table
from .students import Student, StudentChoice, build_student, refuse_other_vocabulary
from .teacher_outputs import FOLDER as OUTPUTS
from .teacher_outputs import StoredOutputs, refuse_storing
from .teacher_texts import FILE as TEXTS
from .teacher_texts import written_rows
from .teaching import ROW, Teaching, probe
from .theseus import Replacing, ReplacingSchedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

    from ..configuration_xformer import XFormerConfig
    from ..finetuning.options import TaskData, TaskOptions
    from ..training.text import TextData


FILE, STUDENT = "distillation.json", "student"
_MADE = (STUDENT, OUTPUTS, TEXTS)  # of one teacher, and of its rows
Told = Callable[[str], None]


@dataclass
class Teacher:
    """What is known of the teacher: the model, its tokenizer, and how its training read rows."""

    model: PreTrainedModel
    tokenizer: Any
    record: dict[str, Any]


class Distiller:
    """Checks a request and runs it; what can be refused is refused before anything is written.

    Args:
        source: text, or, with `task`, rows of a task.
        student: what it is made of.
        objective_fields: of text.
        say: takes lines about the progress.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        choice: Distilling,
        method: str | Mapping[str, Any] | DistillationMethod,
        source: TextData | TaskData,
        args: TrainingArguments,
        *,
        student: StudentChoice | None = None,
        task: TaskOptions | None = None,
        text: OnText | None = None,
        objective_fields: Mapping[str, Any] | None = None,
        measuring: Measuring | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        say: Told = lambda line: None,
    ) -> None:
        self.choice, self.method, self.source, self.args = choice, build_method(method), source, args
        self.task, self.text = task, text or OnText()
        self.objective_fields = dict(objective_fields or {})
        self.measuring = Measuring() if measuring is None else copy.copy(measuring)  # which a run completes
        self.callbacks, self.say = list(callbacks), say
        self.measuring.check()
        made = student or StudentChoice()
        given = {name: value for name, value in changed(choice).items() if name in ("copy_layers", "size")}
        self.student = dataclasses.replace(made, **{**given, **changed(made)})
        self.this_run = Run(args, overwrite=choice.overwrite_output_dir)
        self.folder, self.resumes = self.this_run.folder, self.this_run.resumes
        self._check()

    def _check(self) -> None:
        method, choice = self.method, self.choice
        refuse_processes(self.args)
        refuse_own_source(self.folder, choice.teacher, "--teacher", _MADE)
        if choice.store_teacher:
            from ..finetuning.tasks import task_class

            refuse_storing(method)
            kind = None if self.task is None else task_class(self.task.task)
            if kind is None or kind.generates:
                raise ValueError(
                    "--store_teacher keeps outputs of the rows of a task; of text the rows are masked anew, or their"
                    " predictions are as many numbers as the vocabulary has; leave it out"
                )
            if kind.head == "MultipleChoice" and method.reads_states:
                raise ValueError(
                    f"--store_teacher keeps the states of one text of each row, and rows of {kind.id} have several;"
                    " leave it out, or take --method distilbert with --method.cosine_weight 0"
                )
        if method.replaces and choice.teacher_dtype != "float32":
            raise ValueError(
                f"--teacher_dtype {choice.teacher_dtype}: method {method.type!r} runs layers of the teacher between"
                " the student's, whose numbers are float32; leave it out"
            )
        if method.attention and self.args.gradient_checkpointing:
            raise ValueError(
                f"--gradient_checkpointing computes attention twice, of which method {method.type!r} would read the"
                " pass without gradients; leave it out"
            )
        if self.args.label_smoothing_factor and not method.generates:
            raise ValueError("--label_smoothing_factor and a teacher both soften what is predicted; leave the one out")
        if self.task is not None and not method.replaces and not method.teaches_predictions():
            raise ValueError(
                f"method {method.type!r} as it is set teaches the layers alone, and the student would predict by a"
                " head that has learned nothing; give --method.task_weight 1, or distil on text"
            )

    # ------------------------------------------------------------------------------------------------ the run

    def run(self) -> tuple[dict[str, Any], tuple[Row, Row]]:
        """(summary of the run, the rows of teacher and student)."""
        with self.this_run.lock():
            self._open()
            teacher = self._teacher()
            with self._student(teacher) as made:
                run = self._prepared(teacher)
                before = self._measured(teacher)
            self.say(f"student: {made}")
            summary = run()
            return summary, self._finish(summary, before)

    def _open(self) -> None:
        """Takes up the run that is in the folder, or refuses to lose it."""
        put_back(self.folder, FILE, _MADE)  # of a run that was stopped before it had begun
        there = self.folder / FILE
        if not there.is_file():
            left = next((self.folder / name for name in _MADE if (self.folder / name).exists()), None)
            if left is not None:
                raise ValueError(f"{str(left)!r} is there already and of no distillation; take another --output_dir")
            return
        self.this_run.refuse_loss("a distillation")
        if self.resumes:
            self.this_run.check_settings(read_object(there), self._settings())

    def _settings(self) -> dict[str, Any]:
        """What makes another run of it."""
        settings = {
            "teacher": self.choice.teacher,
            "method": self.method.to_dict(),
            "student": {
                **dataclasses.asdict(self.student),
                "components": dict(self.student.components),
                "fields": dict(self.student.fields),
            },
            "teacher_dtype": self.choice.teacher_dtype,
            "data": dataclasses.asdict(self.source),
            "seed": self.args.seed,
        }
        return json.loads(json.dumps(settings, default=str))  # as it comes back from the file

    # ------------------------------------------------------------------------------------------------ models

    def _teacher(self) -> Teacher:
        """The teacher with the head of the task or of the objective, as one of this package's models."""
        name = self.choice.teacher
        config = load_config(name)
        refuse_quantized(f"the teacher {name!r}", config.to_dict())
        record = training_of(name)
        model: Any
        if self.task is not None:
            model, tokenizer, head = self._of_task(name)
        else:
            objective = choose_objective(config, self.text.objective, self.objective_fields, record)
            head, model, tokenizer = f"For{objective.head}", None, None
            self.text = dataclasses.replace(self.text, objective=objective.id)
        if model is None or not isinstance(model, XFormerPreTrainedModel):
            model = open_model(name, head)[0]
        if tokenizer is None:
            from ..data import load_tokenizer

            tokenizer = load_tokenizer(name)
        return Teacher(self._in_dtype(model).requires_grad_(False).eval(), tokenizer, record)

    def _of_task(self, name: str) -> tuple[Any, Any, str]:
        from ..finetuning.trained import open_trained

        assert self.task is not None
        trained = open_trained(name, task=self.task.task)
        if not trained.task.reads_text:
            raise ValueError(f"distillation reads texts, and {trained.task.id} has none; take a model of another task")
        refuse_adapter(trained.model, f"the teacher {name!r}")
        return trained.model, trained.tokenizer, f"For{trained.task.head}"

    def _in_dtype(self, model: Any) -> Any:
        return _cast(model, getattr(torch, self.choice.teacher_dtype))

    @contextmanager
    def _student(self, teacher: Teacher) -> Iterator[str]:
        """Writes the student that is not there yet; what is refused in the block takes it away again."""
        place = self.folder / STUDENT
        if self.resumes and (self.folder / FILE).is_file() and place.is_dir():
            yield str(read_object(self.folder / FILE).get("made", "as it was"))
            return
        student = self._built(teacher)
        put_aside(self.folder, FILE, _MADE)
        self._save_student(student, teacher, place)
        with self.this_run.in_place_of(FILE, _MADE):
            yield student.made
            write_json(self.folder / FILE, {"status": "running", **self._settings(), "made": student.made})

    def _built(self, teacher: Teacher) -> Student:
        full = _cast(teacher.model, torch.float32)
        student = build_student(full, self.student, self.args.seed)
        if student.folder is not None:
            from ..data import load_tokenizer

            student.tokenizer, names = load_tokenizer(student.folder), (student.folder, self.choice.teacher)
            if not self._compares_texts():
                refuse_other_vocabulary(student.tokenizer, teacher.tokenizer, names)
        if self.method.replaces:
            Replacing(self.method, teacher.model).check(student.model)  # type: ignore[arg-type]
        probe(self.method, student.model, full)
        return student

    def _compares_texts(self) -> bool:
        """Whether nothing but predictions of whole texts is compared, which the teacher has made beforehand: then each
        may read a text in tokens of its own."""
        method, task = self.method, self.task
        tokens = method.reads_states or method.attention or method.generates or method.replaces
        if tokens or task is None or not self.choice.store_teacher:
            return False
        from ..finetuning.tasks import task_class

        return task_class(task.task).head == "SequenceClassification"

    def _save_student(self, student: Student, teacher: Teacher, place: Path) -> None:
        with replacing(place) as scratch:
            student.model.save_pretrained(scratch)
            (student.tokenizer or teacher.tokenizer).save_pretrained(scratch)

    # -------------------------------------------------------------------------------------------- kinds of data

    def _prepared(self, teacher: Teacher) -> Callable[[], dict[str, Any]]:
        """What runs it, once nothing is left to refuse."""
        if self.resumes and newest_complete(self.folder, self.args.world_size) is None:
            self.args.resume_from_checkpoint = None  # it was stopped before the first checkpoint
        return self._prepared_text(teacher) if self.task is None else self._prepared_task(teacher)

    def _teaching(self, teacher: Teacher) -> tuple[Any, list[Any], Any]:
        """(guest of the student's model, further callbacks, what a trainer is given)."""
        if self.method.replaces:
            replacing_ = Replacing(self.method, teacher.model)  # type: ignore[arg-type]
            return replacing_, [ReplacingSchedule(replacing_)], None
        if self.method.generates:
            return None, [], None
        teaching = Teaching(self.method, teacher.model)
        return teaching, [], teaching

    def _prepared_text(self, teacher: Teacher) -> Callable[[], dict[str, Any]]:
        model = ModelChoice(
            init_from=str(self.folder / STUDENT),
            objective=self.text.objective,
            block_size=self.text.block_size or teacher.record.get("block_size"),
            segment_streams=False,
            overwrite_output_dir=self.choice.overwrite_output_dir,
        )
        preparation = Preparation(model, self.source, self.args, objective_fields=self._objective_fields(teacher))  # type: ignore[arg-type]
        read = {"data": dataclasses.asdict(self.source), "block_size": preparation.block_size, "seed": self.args.seed}
        self.measuring.text = read
        self._check_length(teacher, preparation.block_size)
        prepared = preparation.run()

        def run() -> dict[str, Any]:
            guest, callbacks, teaching = self._teaching(teacher)
            kept = prepared
            if self.method.generates:
                kept = self._with_texts(prepared, teacher)
            trainer = None if teaching is None else functools.partial(XFormerTrainer, terms=teaching)
            return train(kept, self.args, [*callbacks, *self.callbacks], make_trainer=trainer, adapters=guest)

        return run

    def _objective_fields(self, teacher: Teacher) -> dict[str, Any]:
        """Settings of the objective: the teacher's own, where it is the same, and those that were given."""
        before = teacher.record.get("objective") or {}
        wanted = self.text.objective or before.get("type")
        same = before.get("type") == wanted
        return {**({k: v for k, v in before.items() if k != "type"} if same else {}), **self.objective_fields}

    def _with_texts(self, prepared: Prepared, teacher: Teacher) -> Prepared:
        if prepared.objective.shape != "decoder" or not hasattr(prepared.train, "column_names"):
            raise ValueError(
                f"method {self.method.type!r} trains on texts that the teacher writes, and objective"
                f" {prepared.objective.id!r} predicts parts of given ones; take a causal model, or --task translation"
            )
        return dataclasses.replace(prepared, train=self._texts(prepared.train, teacher, prepared.tokenizer, 0))

    def _texts(self, features: Any, teacher: Teacher, tokenizer: Any, longest: int) -> Any:
        return written_rows(
            self.folder / TEXTS,
            self.method,  # type: ignore[arg-type]
            teacher.model.to(self.args.device),  # type: ignore[arg-type]
            features,
            tokenizer,
            longest=longest,
            batch_size=self.args.per_device_eval_batch_size,
            say=self.say,
        )

    def _prepared_task(self, teacher: Teacher) -> Callable[[], dict[str, Any]]:
        from ..finetuning.options import ModelOptions, RunOptions
        from ..finetuning.run import FineTuning

        model = ModelOptions(model=str(self.folder / STUDENT))
        run_options = RunOptions(overwrite_output_dir=self.choice.overwrite_output_dir)
        made = FineTuning(model, self.source, self.task, run_options, self.args)  # type: ignore[arg-type]
        if self.method.generates and not made.task.generates:
            raise ValueError(
                f"method {self.method.type!r} trains on texts that the teacher writes, and {made.task.id} has none;"
                " take --method distilbert, pkd, tinybert or minilm"
            )
        self._check_length(teacher, made.task.max_length)
        prepared = made.prepare()

        def run() -> dict[str, Any]:
            guest, callbacks, teaching = self._teaching(teacher)
            made.guest = guest
            if teaching is not None:
                if self.choice.store_teacher:
                    teaching.stored = self._stored(prepared, teacher)
                    made.rows = _numbered
                made.terms = teaching
            if self.method.generates:
                longest = made.task.max_target_length  # type: ignore[attr-defined]
                made.rows = lambda given: self._texts(
                    given.splits["train"].features, teacher, given.tokenizer, longest
                )
            return made.train(prepared, [*callbacks, *self.callbacks])

        return run

    def _stored(self, prepared: Any, teacher: Teacher) -> StoredOutputs:
        model: Any = teacher.model
        model.to(self.args.device)
        task, tokenizer, features = prepared.task, prepared.tokenizer, prepared.splits["train"].features
        if tokenizer.get_vocab() != teacher.tokenizer.get_vocab():  # the same rows, as the teacher reads them
            from ..finetuning.tasks import build_task

            task, tokenizer = build_task(prepared.task.options), teacher.tokenizer
            splits = task.load(self.source)  # type: ignore[arg-type]
            task.settle(splits, model.config)
            features = task.encode(splits["train"], tokenizer, "train").features
        return StoredOutputs.make(
            self.folder / OUTPUTS,
            self.method,
            model,
            features,
            task.collator(tokenizer, model, self.args.seed),
            about={"teacher": self.choice.teacher, "dtype": self.choice.teacher_dtype},
            batch_size=self.args.per_device_eval_batch_size,
            say=self.say,
        )

    def _check_length(self, teacher: Teacher, wanted: int) -> None:
        limit = longest_input(cast("XFormerConfig", teacher.model.config))
        if limit is not None and wanted > limit:
            option = "--block_size" if self.task is None else "--max_length"
            raise ValueError(
                f"rows of {option} {wanted} are too long for the teacher {self.choice.teacher!r}, which reads {limit}"
                f" tokens; shorten {option}"
            )

    # ------------------------------------------------------------------------------------------------ the end

    def _measured(self, teacher: Teacher) -> Row:
        """The teacher's row, before anything is trained, on the rows that the student is measured on."""
        if self.task is not None:
            self.measuring.read_rows_of(cast("TaskData", self.source), teacher.record.get("dataset") or {})
        return measure(self.choice.teacher, self.measuring)

    def _finish(self, summary: dict[str, Any], first: Row) -> tuple[Row, Row]:
        before, after = compare(first, self.folder, self.measuring)
        summary |= {"parameters": after.parameters, "trained_parameters": summary.get("trained_parameters")}
        summary["distillation"] = {"teacher": self.choice.teacher, "method": self.method.to_dict()}
        saved = {**read_summary(self.folder), **{k: v for k, v in summary.items() if v is not None}}
        write_json(self.folder / SUMMARY_FILE, saved)
        made = read_object(self.folder / FILE)
        write_json(self.folder / FILE, {**made, "status": "finished"})
        settings = {"method": self.method.to_dict(), "student": made.get("made")}
        write_table(before, after, self.folder, command="distill", settings=settings)
        return before, after


def _cast(model: Any, wanted: torch.dtype) -> Any:
    if model.dtype == wanted:
        return model
    made = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), dtype=wanted)
    carry_generation(model, made)
    return made


def _numbered(prepared: Any) -> Any:
    """The training rows with their numbers."""
    features = prepared.splits["train"].features
    return features.add_column(ROW, list(range(len(features))))


def distill(
    choice: Distilling,
    method: str | Mapping[str, Any] | DistillationMethod,
    source: TextData | TaskData,
    args: TrainingArguments,
    **options: Any,
) -> tuple[dict[str, Any], tuple[Row, Row]]:
    """[`Distiller`] in one call; what `hf-xformers distill` does."""
    return Distiller(choice, method, source, args, **options).run()
