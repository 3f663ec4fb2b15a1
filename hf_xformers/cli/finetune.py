# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers finetune`: train a saved model, or a variant from random weights, on a task."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.components import SLOTS
from .arguments import Parser, add_model_options, parse_changes, parse_command, parse_fields
from .console import print_facts, say
from .options_file import take_file
from .pretrain import OUTPUT_HELP, quiet_libraries
from .several_tasks import run_several, split_file, split_tasks
from .values import annotation, parse

_DESCRIPTION = """Fine-tune a saved model, or a variant from random weights, on a task, and save it with its tokenizer,
the metrics and the predictions of all held-out rows.

Several tasks at once, each with its data, share one encoder; options of data and task may name their task, too:

  hf-xformers finetune --model M --output_dir both --task a=classification --data a=a.csv --task b=ner --data b=b.csv

FILE.yaml has the options by name, of several tasks as in `task: {a: classification, b: ner}`. Works unchanged under a
launcher:

  accelerate launch -m hf_xformers.cli finetune ..."""
_BRIEF = ("task", "model", "variant", "data", "validation_data", "text_column", "label_column", "peft", "output_dir",
          "learning_rate", "num_train_epochs", "resume_from_checkpoint")  # fmt: skip
GROUPS = (*SLOTS, "decoder", "peft")


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..finetuning import FineTuning
    from ..finetuning.tasks import refuse_unread

    by_file = split_file(take_file(argv)[0])
    commands = split_tasks(argv) if by_file is None else split_tasks(argv[1:], known=by_file)
    if commands is not None:
        own = by_file or {}
        lines = {
            name: parse_command(line, GROUPS, make_parser, options=own.get(name)) for name, line in commands.items()
        }
        one = next(iter(lines.values()))
        return run_several(lines, model_options(one, one.dataclasses[0], one.dataclasses[3]), callbacks)
    parsed = parse_command(argv, GROUPS, make_parser)
    model, source, task, options, intermediate, several, args = parsed.dataclasses
    if several.chosen():
        raise ValueError(
            "--sampling says how often each of several tasks comes; name them with --task NAME=TASK, or leave it out"
        )
    refuse_unread(task, *([intermediate.intermediate_task] if intermediate.intermediate_task else []))
    args.predict_with_generate = args.predict_with_generate and not args.prediction_loss_only
    quiet_libraries(args)
    given = model_options(parsed, model, options)
    if intermediate.intermediate_task is not None:
        from ..finetuning.two_stages import TwoStages

        stages = TwoStages(model, source, task, options, args, intermediate, **given)
        with stages.this_run.lock():
            report(stages.train(say, callbacks), str(args.output_dir))
        return 0
    intermediate.check()
    made = FineTuning(model, source, task, options, args, **given)
    with made.this_run.lock():
        prepared = made.prepare()
        say(f"{prepared.config.model_type}, {prepared.task.id}: {prepared.sizes} rows {prepared.task.extent()}")
        if prepared.checkpoint is not None:
            say(f"resuming from {prepared.checkpoint}")
        summary = made.train(prepared, callbacks)
    report(summary, str(args.output_dir))
    return 0


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser for a task, a model and a size, whose defaults and fields differ."""
    from transformers import Seq2SeqTrainingArguments

    from ..finetuning.multi_task import MultiTaskOptions
    from ..finetuning.options import ModelOptions, RunOptions, TaskData, TaskOptions
    from ..finetuning.presets import finetuning_defaults
    from ..finetuning.two_stages import IntermediateOptions

    parser = Parser(
        [ModelOptions, TaskData, TaskOptions, RunOptions, IntermediateOptions, MultiTaskOptions],
        Seq2SeqTrainingArguments,
        folder=OUTPUT_HELP,
        prog="hf-xformers finetune",
        usage=(
            "hf-xformers finetune [FILE.yaml] --task TASK --model MODEL\n"
            "                            --data FILE --output_dir DIR [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION,
        brief=_BRIEF,
    )
    look = first_look.get
    parser.set_defaults(**finetuning_defaults(look("task"), look("model"), look("size"), look("peft")))
    parser.set_defaults(disable_tqdm=not sys.stderr.isatty())
    add_model_options(parser, _config_class(look("variant"), look("model")))
    methods = parser.add_argument_group("PEFT", "fields of the method's configuration in peft")
    methods.add_argument("--peft.FIELD", metavar="VALUE", default=None, help="such as --peft.r 16")
    return parser


def _config_class(variant: str | None, model: str | None) -> Any:
    from ..variants import config_class

    return config_class(variant or _saved_variant(model) or "xformer")


def _saved_variant(model: str | None) -> str | None:
    """The variant of a saved model; None for a model of another family and for one that is not in a folder."""
    from ..training.run_folder import saved_config
    from ..variants import model_types

    if not model or not (Path(model).expanduser() / "config.json").is_file():
        return None
    found = saved_config(Path(model).expanduser()).get("model_type")
    return found if found in model_types() else None


def model_options(parsed: Any, model: Any, options: Any) -> dict[str, Any]:
    """What `FineTuning` takes besides the dataclasses: components, fields and PEFT settings, typed."""
    config_class = _config_class(model.variant, model.model)
    groups = {name: dict(texts) for name, texts in parsed.groups.items()}
    method = groups.pop("peft", {})
    options.peft = method.pop("type", options.peft)
    fields = parse_fields(config_class, parsed.namespace)
    saved = _saved_variant(model.model) == config_class.model_type
    components = parse_changes(config_class.from_pretrained(model.model) if saved else config_class, groups)
    if "decoder" in components:
        fields["decoder"] = components.pop("decoder")
    return {
        "components": components,
        "fields": fields,
        "peft_fields": _peft_fields(options.peft, method),
    }


def _peft_fields(method: str | None, texts: Mapping[str, str]) -> dict[str, Any]:
    from ..finetuning.peft_methods import PEFT_METHODS, config_type

    if method not in PEFT_METHODS:  # refused by the run, which says what there is
        return dict(texts)
    cls = config_type(method)
    known = getattr(cls, "__dataclass_fields__", {})
    return {
        name: parse(text, annotation(cls, name), f"--peft.{name}") if name in known else text
        for name, text in texts.items()
    }


def report(summary: Mapping[str, Any], folder: str) -> None:
    from ..finetuning.exit_curve import exit_lines
    from .predict import beside_baseline

    rule = summary.get("trivial", {}).get("rule")
    held_out: dict[str, Any] = {}
    for split, prefix in (("validation", "eval"), ("test", "test")):
        metrics = {
            key.removeprefix(f"{prefix}_"): value
            for key, value in summary.items()
            if key.startswith(f"{prefix}_") and not key.endswith("_rows")
        }
        shown = beside_baseline(metrics, summary.get(f"baseline_{split}", {}), None, summary.get("f1_name"))
        held_out |= {f"{name} ({split})": text for name, text in shown.items()}
    before, reach = summary.get("intermediate"), summary.get("adapter_reach")
    facts = {
        "task": summary["task"],
        "after": None if before is None else f"{before['task']}, {before['steps']:,} steps",
        "variant": summary["variant"],
        "parameters": summary["parameters"],
        "trained parameters": summary["trained_parameters"],
        "adapter": reach
        and "in {adapted_layers} of {layers} layers, on {adapted_maps} of {maps} linear maps".format(**reach),
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "best checkpoint": summary["best_checkpoint"],
        **held_out,
        "baseline": rule if any(f"baseline_{split}" in summary for split in ("validation", "test")) else None,
        "saved in": folder,
    }
    print_facts("fine-tuned", facts)
    for split in ("validation", "test"):
        if summary.get(f"exits_{split}"):
            say("\n  ".join([f"early exits ({split})", *exit_lines(summary[f"exits_{split}"])]))
    if summary["peft"] is not None:
        say("\n  ".join(["the adapter is loaded onto its base model with", *adapter_lines(folder, summary)]))


def adapter_lines(folder: str, summary: Mapping[str, Any]) -> list[str]:
    """Python that loads a run's adapter onto its base model, with the labels of the run, which the base knows nothing
    of."""
    from ..finetuning.peft_methods import BOTTLENECKS
    from ..hub.adapter_card import read_adapter
    from ..hub.checkpoint_files import BOTTLENECK, PEFT, Kind

    kind: Kind = BOTTLENECK if summary["peft"] in BOTTLENECKS else PEFT
    return read_adapter(Path(folder).expanduser(), kind, summary["init_from"]).use(folder, local=True)
