# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers distill`: a small model that learns from a large one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.changes import components_of
from ..core.components import SLOTS
from .arguments import Parser, annotation, parse_command, parse_component, parse_fields_of, parse_objective
from .console import print_facts, print_table, say
from .pretrain import quiet_libraries, size_of
from .values import parse

_DESCRIPTION = """Train a small model, the student, to do what a trained one does, the teacher: on the rows of the
teacher's task, or of --task, else on text. Another mechanism, depth or width is --student.FIELD VALUE (such as
--student.num_hidden_layers 3 or --student.attention performer); without these the student has every second layer of
the teacher. At the end a table says what was saved and what it cost.

--method is what the student follows, its settings are --method.FIELD VALUE:

{methods}

A run that was stopped continues, to the same weights, with --resume_from_checkpoint.

FILE.yaml has the options by name."""
_GROUPS = ("method", "student", "objective")


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..compression.distillation import Distiller
    from ..compression.report import table

    parsed = parse_command(argv, _GROUPS, make_parser)
    choice, *options, measuring, args = parsed.dataclasses
    groups = parsed.groups
    measuring.use_cpu = args.use_cpu
    quiet_libraries(args)
    given: dict[str, Any] = {}
    if len(options) == 2 and hasattr(options[1], "task"):
        source, given["task"] = options
        measuring.max_eval_rows = source.max_eval_rows
        args.predict_with_generate = args.predict_with_generate and not args.prediction_loss_only
        if "objective" in groups:
            raise ValueError("--objective is of text, and the teacher does a task; leave it out")
    else:
        text, source = options
        given["text"] = text
        settings = groups.get("objective", {})
        if settings:
            name = text.objective or settings.get("type") or _objective_of(choice.teacher)
            given["objective_fields"] = parse_objective(name, settings)
    distiller = Distiller(
        choice,
        method_options(groups.get("method", {})),
        source,
        args,
        student=student_options(groups.get("student", {}), choice.teacher),
        measuring=measuring,
        callbacks=callbacks,
        say=say,
        **given,
    )
    summary, rows = distiller.run()
    facts = {
        "method": distiller.method.type,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "saved in": str(args.output_dir),
    }
    print_facts("distilled", facts)
    print_table("before and after", *table(*rows))
    return 0


def method_options(texts: Mapping[str, Any]) -> dict[str, Any]:
    """`--method NAME --method.FIELD VALUE`, typed."""
    from ..compression.methods import build_method

    name = texts.get("type", "distilbert")
    fields = {field: text for field, text in texts.items() if field != "type"}
    return {"type": name, **parse_fields_of(type(build_method(name)), fields, "--method")}


def student_options(texts: Mapping[str, Any], teacher: str) -> Any:
    """`--student START --student.FIELD VALUE`, typed by the configuration that the student starts from."""
    from ..compression.students import FROM_SCRATCH, FROM_TEACHER, StudentChoice

    start = str(texts.get("type", FROM_TEACHER))
    fields = {name: text for name, text in texts.items() if name != "type"}
    if not fields:
        return StudentChoice(start=start)
    base = _teachers_config(teacher) if start in (FROM_TEACHER, FROM_SCRATCH) else _variants_config(start)
    there = components_of(base)
    cls = base if isinstance(base, type) else type(base)
    nested: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for path, text in fields.items():
        head, _, field = path.partition(".")
        if head in SLOTS:
            nested.setdefault(head, {})[field or "type"] = text
        elif field or head == "decoder":
            raise ValueError(f"there is no --student.{path}; give components and fields of the configuration")
        else:
            plain[head] = parse(text, annotation(cls, head), f"--student.{head}")
    components = {slot: parse_component(slot, given, there[slot], "student.") for slot, given in nested.items()}
    return StudentChoice(start=start, components=components, fields=plain)


def _teachers_config(teacher: str) -> Any:
    from ..conversion.swap import source_config

    return source_config(teacher)


def _variants_config(start: str) -> Any:
    from ..variants import config_class, resolve

    if Path(start).expanduser().is_dir():
        raise ValueError(
            f"--student {start!r} is a saved model, whose weights belong to its own shape; leave --student.FIELD out"
        )
    return config_class(resolve(start))


def _objective_of(teacher: str) -> str:
    from ..training.scoring import choose_objective, load_config, training_of

    return choose_objective(load_config(teacher), None, {}, training_of(teacher)).id


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser for a teacher: of a task it reads rows, else text."""
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    from ..compression.distilling_options import Distilling, OnText
    from ..compression.report import Measuring, MeasuringOfTask
    from ..finetuning.options import TaskData, TaskOptions
    from ..finetuning.presets import finetuning_defaults
    from ..training.presets import training_defaults
    from ..training.text import TextData

    teacher, task = first_look.get("teacher"), first_look.get("task")
    known = task_of(teacher)
    kinds = [TaskData, TaskOptions, MeasuringOfTask] if task or known else [OnText, TextData, Measuring]
    parser = Parser(
        [Distilling, *kinds],
        Seq2SeqTrainingArguments if task or known else TrainingArguments,
        folder="Folder for the student, the run, and the table compression.json.",
        prog="hf-xformers distill",
        usage=(
            "hf-xformers distill [FILE.yaml] --teacher MODEL --data FILE\n"
            "                           --output_dir DIR [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION.replace("{methods}", _methods()),
    )
    if task or known:
        options = known.get("task_options", {}) if known.get("task") in (task, None) or not task else {}
        fields = {name: value for name, value in options.items() if name in TaskOptions.__dataclass_fields__}
        parser.set_defaults(**{**fields, "task": task or known.get("task")})
        parser.set_defaults(**finetuning_defaults(task or known.get("task"), teacher, None, None))
    else:
        parser.set_defaults(**training_defaults(size_of(teacher)))
    parser.set_defaults(disable_tqdm=not sys.stderr.isatty())
    for action in parser._actions:
        if action.dest == "task":
            action.required = False
            action.help = f"{action.help} Default: the teacher's."
    import argparse

    group = parser.add_argument_group("method and student")
    for name, text in (
        ("method", "what the student follows (default: distilbert)"),
        ("student", "teacher: layers of it (default); scratch: its shape; a variant; or the folder of a model"),
    ):
        group.add_argument(f"--{name}", metavar="NAME", default=argparse.SUPPRESS, help=text)
    return parser


def _methods() -> str:
    from ..compression.methods import METHODS

    size = max(map(len, METHODS))
    return "\n".join(f"  {name.ljust(size)}  {cls.summary}" for name, cls in METHODS.items())


def task_of(teacher: Any) -> dict[str, Any]:
    """What the run of a teacher says of its task; empty for a language model and one from elsewhere."""
    from ..finetuning.trained import does_a_task
    from ..training.run_folder import read_summary

    if not teacher or not does_a_task(str(teacher)):
        return {}
    found = read_summary(Path(str(teacher)).expanduser())
    if found.get("task"):
        return found
    from ..finetuning.trained import open_trained

    return {"task": open_trained(str(teacher)).task.id}
