# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers quantize`: weights in 8 or 4 bits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Parser, parse_command
from .console import in_options, print_facts, print_table, say
from .pretrain import quiet_libraries

_DESCRIPTION = """Save a trained model with weights of 8 or 4 bits, through torchao (pip install
hf_xformers[quantize]). The result is read by from_pretrained, evaluate and predict as any other model is.

What must not be quantized stays as it is: what makes the scores of labels and tokens, and what decides (routers,
gates, keys of a memory). --sensitivity says how far each type of module by itself moves the outputs, --keep leaves
more as it is.

With --quantization_aware the model is trained first, as finetune does it, with weights rounded in every pass:

  hf-xformers quantize --model DIR --weights int4 --quantization_aware --data train.csv --output_dir DIR

FILE.yaml has the options by name."""


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..compression.quantizable import kind_of
    from ..compression.quantization import Quantizer
    from ..compression.report import table

    parsed = parse_command(argv, (), make_parser)
    choice, *options, measuring, args = parsed.dataclasses
    measuring.use_cpu = args.use_cpu
    given: dict[str, Any] = {}
    if options:
        quiet_libraries(args)
        measuring.max_eval_rows = options[0].max_eval_rows
        given = {"data": options[0], "task": options[1], "args": args, "callbacks": callbacks}
        args.predict_with_generate = args.predict_with_generate and not args.prediction_loss_only
    folder = str(args.output_dir)
    with in_options({} if options else {"--data": "--eval_data"}):
        parts, before, after = Quantizer(choice, folder, measuring=measuring, say=say, **given).run()
    kept = {kind_of(name).rpartition("*.")[2]: reason for name, reason in parts.kept.items()}
    facts = {
        "weights": choice.weights + (f", groups of {choice.group_size}" if choice.grouped else ", a scale by output"),
        "activations": "8 bits, by token" if choice.activations == "int8" else "as they are",
        "quantized": f"{len(parts.chosen)} modules",
        "left as they are": f"{len(parts.kept)} modules" if kept else "none",
        **{f"... {kind}": reason for kind, reason in kept.items()},
        "saved in": folder,
    }
    print_facts("quantized", facts)
    print_table("before and after", *table(before, after))
    return 0


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser; only a training beforehand reads data and Trainer's options."""
    from transformers import Seq2SeqTrainingArguments

    from ..compression.quantization import Quantizing
    from ..compression.report import Measuring, MeasuringOfTask
    from ..finetuning.options import TaskData, TaskOptions
    from ..finetuning.presets import finetuning_defaults
    from .distill import task_of

    model = first_look.get("model")
    trains = first_look.get("quantization_aware", "no").lower() not in ("false", "no", "0")
    known = task_of(model) if trains else {}
    parser = Parser(
        [Quantizing, *([TaskData, TaskOptions, MeasuringOfTask] if trains else [Measuring])],
        Seq2SeqTrainingArguments,
        read=None if trains else ("output_dir", "use_cpu"),
        folder="Folder for the quantized model and the table compression.json.",
        prog="hf-xformers quantize",
        usage=(
            "hf-xformers quantize [FILE.yaml] --model MODEL --output_dir DIR\n"
            "                            [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION,
    )
    if trains:
        fields = {k: v for k, v in known.get("task_options", {}).items() if k in TaskOptions.__dataclass_fields__}
        task = first_look.get("task") or known.get("task")
        parser.set_defaults(**{**fields, "task": task})
        parser.set_defaults(**finetuning_defaults(task, model, None, None))
        parser.set_defaults(disable_tqdm=not sys.stderr.isatty())
    for action in parser._actions:
        if action.dest == "task":
            action.required = False
            action.help = f"{action.help} Default: the model's."
    return parser
