# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers finetune --task a=classification --task b=tagging ...`: a command line for each task, and a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .arguments import Parsed
from .console import print_facts, say


def split_file(options: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The options of a file for each named task; None where its `task` names none. A task's own value of an option is
    an entry under its name:

    task: {a: classification, b: tagging}
    data: {a: a.csv, b: [b1.csv, b2.csv]}
    """
    kinds = options.get("task")
    if not isinstance(kinds, Mapping):
        return None
    for name in kinds:
        _check_name(str(name), f"task: {name}")
    found: dict[str, dict[str, Any]] = {str(name): {} for name in kinds}
    for option, value in options.items():
        own = isinstance(value, Mapping) and bool(value) and set(value) <= set(kinds)
        for name in kinds:
            if not own:
                found[str(name)][option] = value
            elif name in value:
                _check_own(option, str(name))
                found[str(name)][option] = value[name]
    return found


def _check_name(name: str, given: str) -> None:
    from torch import nn

    if not name.isidentifier() or hasattr(nn.ModuleDict(), name):  # which has the heads by their tasks' names
        raise ValueError(
            f"{given}: {name!r} is to be the name of a folder and of a head; use other letters and digits"
        )


def _check_own(option: str, name: str) -> None:
    """Raises ValueError for a task's own value of an option that the run has once."""
    from ..finetuning.options import TaskData, TaskOptions

    option = option.removeprefix("--").replace("-", "_")
    if option not in {entry.name for cls in (TaskData, TaskOptions) for entry in dataclasses.fields(cls)}:
        raise ValueError(
            f"--{option} is one for all tasks, and {name!r} is one of them; give it without a task's name, or train"
            " the tasks apart"
        )


def split_tasks(argv: Sequence[str], known: Iterable[str] = ()) -> dict[str, list[str]] | None:
    """The command line of each named task, where `--option NAME=VALUE` has become `--option VALUE` for that task and
    is missing for the others; None where `--task` names no tasks. known: tasks that a file has named.

    A value without a name is for all tasks that have none of their own. Raises ValueError for names that clash.
    """
    groups = _groups(argv)
    kinds: dict[str, str] = {}
    plain = []
    for flag, values in groups:
        for value in values if _is(flag, "task") else ():
            name, equals, kind = value.partition("=")
            if not equals:
                plain.append(value)
            elif name in kinds:
                raise ValueError(f"--task {value}: there is a task {name!r} already; give this one another name")
            else:
                _check_name(name, f"--task {value}")
                kinds[name] = kind
    names = list(known) or list(kinds)
    strange = [name for name in kinds if name not in names]
    if strange:
        raise ValueError(
            f"--task {strange[0]}={kinds[strange[0]]}: the file has the tasks {', '.join(names)}; name this one there"
        )
    if not names:
        return None
    if plain:
        raise ValueError(
            f"--task {plain[0]} has no name besides the named tasks {', '.join(names)}; write --task NAME={plain[0]}"
        )
    return {name: _own(groups, name, names) for name in names}


def _is(flag: str | None, name: str) -> bool:
    return flag is not None and flag.removeprefix("--").replace("-", "_") == name


def _groups(argv: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """The tokens by option: (None, what stands before the first one), then (option, its values)."""
    groups: list[tuple[str | None, list[str]]] = [(None, [])]
    for token in argv:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            groups.append((flag, [value] if equals else []))
        else:
            groups[-1][1].append(token)
    return groups


def _own(groups: Sequence[tuple[str | None, list[str]]], name: str, kinds: Iterable[str]) -> list[str]:
    named: dict[str, list[str]] = {}  # by option, the values that are this task's
    for flag, values in groups:
        for value in values:
            owner, equals, rest = value.partition("=")
            if flag is not None and equals and owner == name:
                _check_own(flag, name)
                named.setdefault(flag, []).append(rest)
    tokens: list[str] = []
    done: set[str] = set()
    for flag, values in groups:
        if flag is None:
            tokens += values
        elif flag in named:
            if flag not in done:
                tokens += [flag, *named[flag]]
            done.add(flag)
        else:
            shared = [value for value in values if value.partition("=")[0] not in kinds or "=" not in value]
            if shared or not values:
                tokens += [flag, *shared]
    return tokens


def run_several(parsed: Mapping[str, Parsed], given: Mapping[str, Any], callbacks: Sequence[Any] = ()) -> int:
    """parsed: by task its command line. given: what belongs to the model, as [`FineTuning`] takes it."""
    from ..finetuning.multi_run import MultiTaskTuning, run_tasks
    from ..finetuning.tasks import refuse_unread
    from .pretrain import quiet_libraries

    model, _, _, options, intermediate, several, args = next(iter(parsed.values())).dataclasses
    if intermediate.intermediate_task is not None:
        raise ValueError(
            "--intermediate_task comes before one task; train on it by itself, and give its folder as --model"
        )
    intermediate.check()
    quiet_libraries(args)
    requests = {name: found.dataclasses[1:3] for name, found in parsed.items()}
    for _, task in requests.values():
        refuse_unread(task, *(other.task for _, other in requests.values() if other is not task))
    made = MultiTaskTuning(model, requests, options, args, several, **given)
    with made.this_run.lock():
        summary = run_tasks(made, say, callbacks)
    report(summary, str(args.output_dir))
    return 0


def report(summary: Mapping[str, Any], folder: str) -> None:
    from .predict import beside_baseline

    held_out: dict[str, Any] = {}
    for name, about in summary["tasks"].items():
        held_out[f"task {name}"] = f"{about['task']}, {about['train_rows']:,} training rows"
        for split, prefix in (("validation", "eval"), ("test", "test")):
            metrics = {
                key.removeprefix(f"{prefix}_"): value
                for key, value in about.items()
                if key.startswith(f"{prefix}_") and not key.endswith("_rows")
            }
            shown = beside_baseline(metrics, about.get(f"baseline_{split}", {}), None, about.get("f1_name"))
            held_out |= {f"{name} {metric} ({split})": text for metric, text in shown.items()}
    facts = {
        "variant": summary["variant"],
        "parameters": summary["parameters"],
        "trained parameters": summary["trained_parameters"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "best checkpoint": summary["best_checkpoint"],
        **held_out,
        "saved in": ", ".join(f"{folder}/{name}" for name in summary["tasks"]),
    }
    print_facts("fine-tuned", facts)
