# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers benchmark`: time, memory and quality of variants compared with dense attention."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.components import SLOTS, did_you_mean
from .console import cell_text, error_console, print_table, say
from .parser import CommandParser
from .values import parse

if TYPE_CHECKING:
    from ..benchmark.entries import Entry
    from ..benchmark.runner import Comparison, Settings

_DESCRIPTION = """Compare variants with each other and with dense attention: time and peak memory of forward and
backward at growing lengths and, with --train, what small models of them learn on tasks. Every figure comes from a
fresh process; what fails, runs out of memory or takes too long there is reported, and the others continue.

Writes results.json, results.md, attention maps and, with matplotlib, plots (PNG and SVG) to --output_dir."""
_EPILOG = """An entry of --variants is a variant, or LABEL=VARIANT; --set changes it, as in

  --variants narrow=longformer,wide=longformer,mix=xformer \\
    --set narrow.attention.window=128 \\
    --set mix.attention=performer --set mix.num_key_value_heads=2

A component of yours, in my_attention.py:

  hf-xformers benchmark --import my_attention --variants mine=xformer,longformer \\
    --set mine.attention=my_attention"""


def run(argv: Sequence[str]) -> int:
    from ..benchmark.plots import HINT, can_plot
    from ..benchmark.report import write_report
    from ..benchmark.runner import Comparison
    from ..training.folder_lock import folder_lock

    parser = make_parser()
    options = parser.parse_args(list(argv))
    if options.suite:
        parser.set_defaults(**SUITES[options.suite])
        options = parser.parse_args(list(argv))
    settings = read_settings(options)
    entries = read_entries(options.variants, options.set)
    with folder_lock(options.output_dir):
        comparison = Comparison(
            entries, settings, options.output_dir, resume=options.resume, overwrite=options.overwrite_output_dir
        )
        if not can_plot():
            say(f"no plots will be drawn: {HINT}")
        _measure(comparison)
        files = write_report(comparison)
    _show(comparison)
    say(f"{', '.join(files)} in {comparison.folder}")
    measured = [row for kind in ("speed", "quality") for row in comparison.rows(kind)]
    return 0 if any(row["status"] == "ok" for row in measured) else 1


def make_parser() -> CommandParser:
    from ..benchmark.quality import Training
    from ..benchmark.runner import Settings
    from ..benchmark.steps import LEVELS
    from ..benchmark.tasks import TASKS
    from ..training.presets import SIZES

    parser = CommandParser(
        prog="hf-xformers benchmark",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )

    def add(name: str, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **settings)

    usual, training = Settings(), Training()
    add("variants", required=True, metavar="A,B,...", help="what to compare; dense attention always comes along")
    add("set", action="append", default=[], metavar="LABEL.OPTION=VALUE", help="a component or field of one entry")
    add("output_dir", required=True, metavar="FOLDER", help="where results go")
    add("resume", action="store_true", help="keep the finished cells in the folder, measure what is missing or failed")
    add("overwrite_output_dir", action="store_true", help="begin again in a folder that has results")
    lengths = ",".join(map(str, usual.lengths))
    add("lengths", default=lengths, metavar="T,...", help=f"tokens per row (default {lengths})")
    add("level", choices=LEVELS, default=usual.level, help="one attention layer (default), or a whole model")
    add("size", choices=list(SIZES), default=usual.size, help=f"of whole models (default {usual.size})")
    shape = parser.add_mutually_exclusive_group()
    for flag, name in (("--encoder", "encoder"), ("--causal", "decoder"), ("--seq2seq", "seq2seq")):
        shape.add_argument(
            flag,
            dest="shape",
            action="store_const",
            const=name,
            help=f"compare {name} models (default: the first of encoder, decoder, seq2seq that all are made for)",
        )
    add("batch_size", type=int, default=usual.batch_size, metavar="N", help="rows (default 1)")
    add("dtype", choices=("float32", "bfloat16"), default=usual.dtype, help=f"of weights (default {usual.dtype})")
    add("device", choices=("cpu", "cuda"), default=usual.device, help=f"where (default {usual.device})")
    add(
        "threads",
        type=int,
        default=usual.threads,
        metavar="N",
        help="of a CPU; with 1 (default) time is processor time",
    )
    add("rounds", type=int, default=usual.rounds, metavar="N", help=f"timed steps (default {usual.rounds})")
    add("max_memory", type=float, metavar="MIB", help="what a process may take beyond its start (default: no limit)")
    add(
        "timeout",
        type=float,
        default=usual.timeout,
        metavar="S",
        help=f"seconds of a process (default {usual.timeout:g})",
    )
    add("no_maps", action="store_true", help="leave the attention maps out")
    add(
        "suite",
        choices=list(SUITES),
        help="options for a question; recall: accuracy against the size of the state, of rows full of pairs to"
        " remember (--tasks recall,two_hop,parity,permutations asks for more than that)",
    )
    learn = parser.add_argument_group("quality")

    def train(name: str, **settings: Any) -> None:
        learn.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **settings)

    train("train", action="store_true", help="also train a small model of every entry on the tasks")
    train("train_only", action="store_true", help="the same without time and memory")
    train(
        "tasks",
        default="copy,mqar",
        metavar="A,...",
        help=f"of {', '.join(TASKS)} (default copy,mqar), or all (with --causal those of causal models as well)",
    )
    for name, text in (
        ("steps", "training steps"),
        ("train_batch_size", "rows a step"),
        ("train_length", "tokens per row"),
        ("train_hidden_size", "width"),
        ("train_layers", "layers"),
        ("train_heads", "heads"),
        ("seed", "of weights and rows"),
    ):
        default = getattr(training, _FIELDS[name])
        if name in _SWEPT:
            train(name, type=_numbers(int), default=[default], metavar="N,...", help=f"{text} (default {default})")
        else:
            train(name, type=int, default=default, metavar="N", help=f"{text} (default {default})")
    rate = training.learning_rate
    train("learning_rate", type=_numbers(float), default=[rate], metavar="X,...", help=f"peak (default {rate:g})")
    return parser


def _numbers(of: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """Numbers with commas between them."""

    def read(text: str) -> list[Any]:
        return list(dict.fromkeys(of(part) for part in text.split(",")))

    read.__name__ = f"list of {of.__name__}"  # what argparse calls it in an error
    return read


# What a suite sets where the command line does not.
SUITES: dict[str, dict[str, Any]] = {
    "recall": {
        **{"train_only": True, "no_maps": True, "tasks": "recall", "shape": "decoder"},
        **{"train_hidden_size": [32, 64, 128], "learning_rate": [1e-3, 3e-3, 1e-2], "seed": [0, 1, 2]},
        **{"train_length": 128, "train_batch_size": 32, "steps": 2000},
    }
}
# Options of which several values are trained, each with each.
_SWEPT = ("train_hidden_size", "learning_rate", "seed")
# option -> field of Training
_FIELDS = {
    "steps": "steps",
    "train_batch_size": "batch_size",
    "train_length": "length",
    "train_hidden_size": "hidden_size",
    "train_layers": "layers",
    "train_heads": "heads",
    "seed": "seed",
    "learning_rate": "learning_rate",
}


def read_settings(options: argparse.Namespace) -> Settings:
    """The settings of a command line. Raises ValueError for values that cannot be."""
    from ..benchmark.measure import measures_memory
    from ..benchmark.quality import Training
    from ..benchmark.runner import Settings
    from ..benchmark.tasks import TASKS

    if options.resume and options.overwrite_output_dir:
        raise ValueError("--resume keeps what the folder has, and --overwrite_output_dir begins again; drop one")
    given = {name: getattr(options, name) for name in ("max_memory", "timeout", "batch_size", "threads", "rounds")}
    given |= {name: getattr(options, name) for name in _FIELDS if name != "seed"}
    for name, values in given.items():
        for value in values if isinstance(values, list) else [values]:
            if value is None or (isinstance(value, int) and value >= 1):
                continue
            if isinstance(value, int):
                raise ValueError(f"argument --{name}: {value} is too small; take at least 1")
            if not value > 0:
                raise ValueError(f"argument --{name}: {value:g} must be greater than 0")
    if min(options.seed) < 0:
        raise ValueError(f"argument --seed: {min(options.seed)} is too small; take at least 0")
    for width in options.train_hidden_size:
        if width % options.train_heads:
            raise ValueError(
                f"--train_hidden_size {width} cannot be divided among --train_heads {options.train_heads}"
            )
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("argument --device: there is no CUDA device here; take cpu")
    elif options.max_memory is not None and not measures_memory(options.device):
        raise ValueError("argument --max_memory: processes can be limited under Linux and on CUDA only; leave it out")
    tasks: tuple[str, ...] = ()
    if options.train or options.train_only:
        every = [name for name, task in TASKS.items() if options.shape == "decoder" or not task.causal]
        tasks = tuple(every if options.tasks == "all" else _names(options.tasks, "--tasks"))
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise ValueError(
                f"argument --tasks: unknown task {unknown[0]!r}.{did_you_mean(unknown[0], TASKS)} Choose from"
                f" {', '.join(TASKS)}, or all"
            )
        short = [task for task in tasks if options.train_length < TASKS[task].shortest]
        if short:
            least = TASKS[short[0]].shortest
            raise ValueError(
                f"argument --train_length: task {short[0]!r} needs at least {least} tokens, not {options.train_length}"
            )
    else:
        usual = make_parser().get_default
        idle = [name for name in ("tasks", *_FIELDS) if getattr(options, name) != usual(name)]
        if idle:
            raise ValueError(f"--{idle[0]} is about training; add --train or --train_only, or leave it out")
    swept = options.suite or any(len(getattr(options, name)) > 1 for name in _SWEPT)

    def first(value: Any) -> Any:
        return value[0] if isinstance(value, list) else value

    return Settings(
        lengths=() if options.train_only else tuple(_lengths(options.lengths)),
        level=options.level,
        size=options.size,
        batch_size=options.batch_size,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        rounds=options.rounds,
        shape=options.shape,
        max_memory=options.max_memory,
        timeout=options.timeout,
        tasks=tasks,
        training=Training(**{field: first(getattr(options, name)) for name, field in _FIELDS.items()}),
        sweep={_FIELDS[name]: getattr(options, name) for name in _SWEPT} if swept else {},
        maps=not options.no_maps,
    )


def _names(text: str, option: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ValueError(f"argument {option}: {text!r} names nothing; give names with commas between them")
    return names


def _lengths(text: str) -> list[int]:
    lengths = []
    for part in _names(text, "--lengths"):
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(
                f"argument --lengths: {part!r} is no number of tokens; give whole numbers with commas between them, as"
                " in 512,1024"
            )
        lengths.append(int(part))
    return lengths


def _instead(name: str, known: Iterable[str]) -> str:
    """How an unknown variant is given, if it is a component, or the nearest known one."""
    slot = next((slot for slot, registry in SLOTS.items() if name in list(registry)), None)
    if slot is not None:
        return f" It is a component: write {name}=xformer and --set {name}.{slot}={name}."
    return did_you_mean(name.removeprefix("xf_"), [entry.removeprefix("xf_") for entry in known])


def read_entries(variants: str, changes: Sequence[str]) -> list[Entry]:
    """The entries of `--variants` with the changes of `--set`.

    Raises:
        ValueError: an unknown variant (the message has near ones), label, component or field, or a value that does not
            fit.
    """
    from ..benchmark.entries import Entry
    from ..variants import config_class, model_types

    chosen: dict[str, str] = {}
    known = model_types()
    for part in _names(variants, "--variants"):
        label, equals, name = part.partition("=")
        name = (name if equals else label).strip()
        model_type = next((candidate for candidate in (name, f"xf_{name}") if candidate in known), None)
        if model_type is None:
            raise ValueError(
                f"argument --variants: there is no variant {name!r}.{_instead(name, known)} `hf-xformers list` shows"
                " all of them"
            )
        label = label.strip() if equals else name.removeprefix("xf_")
        if label in chosen:
            raise ValueError(f"argument --variants: the label {label!r} stands for two entries; write LABEL=VARIANT")
        chosen[label] = model_type
    texts: dict[str, dict[str, str]] = {label: {} for label in chosen}
    for change in changes:
        path, equals, value = change.partition("=")
        label, dot, option = path.partition(".")
        if not equals or not dot or not option:
            raise ValueError(f"argument --set: {change!r} is not of the form LABEL.OPTION=VALUE")
        if label not in chosen:
            raise ValueError(f"argument --set: {change!r} is about {label!r}, which is none of {', '.join(chosen)}")
        texts[label][option] = value
    entries = []
    for label, model_type in chosen.items():
        components, fields = _changes(config_class(model_type), label, texts[label])
        entries.append(Entry(label, model_type, components, fields))
    return entries


def _changes(config_class: Any, label: str, texts: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    from ..training.building import with_changes
    from .arguments import annotation, parse_changes, parse_layers

    slots: dict[str, dict[str, str]] = {}
    fields: dict[str, Any] = {}
    known = [field.name for field in dataclasses.fields(config_class)]
    for option, text in texts.items():
        name, _, field = option.partition(".")
        if name in SLOTS:
            slots.setdefault(name, {})[field or "type"] = text
        elif option == "per_layer_config":
            fields[name] = parse_layers(text, f"--set {label}.{name}")
        elif field or name not in known:
            near = [*SLOTS, *known]
            raise ValueError(
                f"argument --set: {config_class.model_type} has no component or field"
                f" {option!r}.{did_you_mean(name, near)} See `hf-xformers list --components`"
            )
        else:
            fields[name] = parse(text, annotation(config_class, name), f"--set {label}.{name}")
    components = parse_changes(config_class, slots)
    with_changes(config_class, components, fields)  # refuses unknown names and fields before anything is measured
    return components, fields


# ------------------------------------------------------------------------------------------------ on the screen


def _measure(comparison: Comparison) -> None:
    missing = len(comparison.missing())
    kept = len(comparison.cells()) - missing
    if kept:
        say(f"{kept} of {kept + missing} cells are there already")
    if sys.stderr.isatty():
        _measure_with_bar(comparison, missing)
        return
    begun: list[str] = []
    for number, row in enumerate(comparison.run(lambda cell: begun.append(str(cell))), start=1):
        found = {"speed": "ms", "quality": "accuracy"}.get(row["kind"])
        figure = f", {found} {cell_text(row[found])}" if row["status"] == "ok" and found else ""
        reason = "" if row["status"] == "ok" else f": {row['error']}"
        say(f"{number}/{missing} {begun[-1]}: {row['status']}{figure}{reason}")


def _measure_with_bar(comparison: Comparison, missing: int) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=error_console()) as progress:
        bar = progress.add_task("", total=missing)
        for row in comparison.run(lambda cell: progress.update(bar, description=str(cell).replace("[", r"\["))):
            progress.advance(bar)
            if row["status"] != "ok":
                at = f" at {row['at']}" if row["at"] else ""
                progress.console.print(
                    f"{row['label']}{at}: {row['status']}: {row['error']}", markup=False, soft_wrap=True
                )


def _show(comparison: Comparison) -> None:
    from ..benchmark.report import disturbed
    from ..hub.sweep import SWEEP, best_of_sweep

    speed, quality = comparison.rows("speed"), comparison.rows("quality")
    if speed:
        columns = ("label", "shape", "at", "ms", "time ratio", "peak MiB", "memory ratio", "status")
        names = ("", "shape", "tokens", *columns[3:])
        rows = ([row.get(column) if row.get(column) is not None else "" for column in columns] for row in speed)
        print_table("time and memory of forward and backward, ratios to dense attention", names, rows)
        for sentence in disturbed(speed):
            say(sentence)
    if quality:
        if comparison.settings.sweep:
            rows = ([row[column] for column in SWEEP] for row in best_of_sweep(quality))
            print_table(f"held out, after {comparison.settings.training.steps} steps", SWEEP, rows)
            return
        columns = ("label", "shape", "at", "accuracy", "chance accuracy", "loss", "seconds", "status")
        names = ("", "shape", "task", "accuracy", "chance", "loss", "seconds", "status")
        rows = ([row.get(column, "") for column in columns] for row in quality)
        print_table(f"held out, after {comparison.settings.training.steps} steps", names, rows)
