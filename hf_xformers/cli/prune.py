# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers prune`: a trained model without some of its heads, layers or weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Parser, named_option, parse_command
from .console import print_table, say, show
from .pretrain import quiet_libraries, size_of

_DESCRIPTION = """Remove attention heads, layers or weights from a trained model, fine-tuned or pretrained, and save
what is left, with a table of size, time and quality before and after.

Heads and layers are removed physically: the smaller model has fewer parameters, and trains, generates and is pruned
again like any other. Weights become zeros. For example:

  hf-xformers prune --model runs/sst2 --output_dir runs/fewer --method heads --share 0.4
  hf-xformers prune --model runs/sst2 --output_dir runs/fewer --method heads --by gates --num_train_epochs 2
  hf-xformers prune --model runs/lm --output_dir runs/half --method layers --keep_layers 6
  hf-xformers prune --model runs/lm --output_dir runs/sparse --method weights --pattern 2:4

Heads by gates, weights by movement and --train_masked train, with Trainer's options; such a run continues with
--resume_from_checkpoint. Others take no step: continue with `hf-xformers finetune --model DIR`.

FILE.yaml has the options by name."""


# The usual options of Trainer, which have no effect where nothing is trained.
_OF_TRAINING = ("learning_rate", "num_train_epochs", "max_steps")


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..compression.pruning import Pruner
    from ..compression.report import table

    parsed = parse_command(argv, (), make_parser)
    choice, measuring, args = parsed.dataclasses
    quiet_libraries(args)
    pruner = Pruner(choice, measuring, args, callbacks=callbacks, say=say)
    idle = [*_OF_TRAINING, *(() if choice.reads_rows else ("per_device_train_batch_size",))]
    idle = [name for name in idle if not choice.trains and named_option(argv, name) is not None]
    if idle:
        raise ValueError(
            f"--{idle[0]} is about training, and --method {choice.method} by {choice.told_by} takes no step; leave"
            " it out, and continue with `hf-xformers finetune --model DIR`"
        )
    rows = pruner.run()
    if rows is not None:
        print_table(f"pruned: {choice.method} by {choice.told_by}", *table(*rows))
    show(f"saved in {args.output_dir}", indent=2)
    return 0


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser for a model, whose size and task decide the defaults of training."""
    from transformers import Seq2SeqTrainingArguments

    from ..compression.choice import Pruning
    from ..compression.report import Measuring
    from ..finetuning.presets import finetuning_defaults
    from ..finetuning.trained import does_a_task
    from ..training.presets import training_defaults
    from ..training.run_folder import read_summary

    parser = Parser(
        [Pruning, Measuring],
        Seq2SeqTrainingArguments,
        folder="Folder for the smaller model, with compression.json, the table before and after.",
        prog="hf-xformers prune",
        usage=(
            "hf-xformers prune [FILE.yaml] --model MODEL --method METHOD\n"
            "                         --output_dir DIR [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION,
    )
    model = first_look.get("model")
    defaults = training_defaults(size_of(model))
    with contextlib.suppress(ValueError):  # what is refused with a better word when it is opened
        if model is not None and does_a_task(model):
            defaults = finetuning_defaults(read_summary(model).get("task"), model, None, None)
    parser.set_defaults(**defaults, disable_tqdm=not sys.stderr.isatty())
    parser.set_defaults(load_best_model_at_end=False)
    return parser
