# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers linearize`: a trained model with another attention, whose state for generation does not grow."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Parser, parse_changes, parse_command, parse_objective
from .console import in_options, print_facts, say, show
from .pretrain import quiet_libraries, size_of

_DESCRIPTION = """Turn a trained model with softmax attention into one whose state for generation has a constant size,
in stages: the new attention takes the projections of the old one (attention transfer: each layer learns what its own
softmax attention gives), then all weights learn the objective and the source's predictions (distillation), then, if
asked for, adapters that are merged at the end (LoRA).

--attention is hedgehog, t2r, lolcats, performer, linear_transformer, delta_net, gated_delta_net, mamba2, or any other
that fits, with fields as --attention.FIELD VALUE. A run that was stopped continues, to the same weights, with
--resume_from_checkpoint.

FILE.yaml has the options by name."""
_GROUPS = ("attention", "objective")
_OPTIONS = {"--init_from": "--model", "layers": "--layers", "transfer_loss": "--transfer_loss"}


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..conversion.swap import source_config
    from ..training.building import objective_of_shape
    from ..training.linearizing import Linearizer

    parsed = parse_command(argv, _GROUPS, make_parser)
    choice, source, args = parsed.dataclasses
    config = source_config(choice.model)
    given = parsed.groups.get("attention", {})
    if "type" not in given:
        raise ValueError(
            "give --attention NAME, what takes the place of softmax attention: hedgehog, lolcats, t2r, ..."
        )
    attention = parse_changes(config, {"attention": given})["attention"]
    usual = objective_of_shape("decoder" if config.is_decoder else "encoder").type
    settings = parse_objective(choice.objective or usual, parsed.groups.get("objective", {}))
    quiet_libraries(args)
    with in_options(_OPTIONS):
        linearizer = Linearizer(
            choice, attention, source, args, objective_fields=settings, callbacks=callbacks, say=say
        )
        record = linearizer.run()
    facts: dict[str, Any] = {
        "attention": f"{record.attention['type']} in {len(record.layers)} layers",
        "held-out loss of the source": record.source_loss,
        "... after the swap": record.swapped_loss,
        **{f"... after {stage.name}": stage.loss for stage in record.stages},
        "... of token frequencies alone": record.baseline_loss,
        "saved in": str(args.output_dir),
    }
    print_facts("linearized", facts)
    for line in record.sentences():
        show(line, indent=2, hanging=2)
    return 0


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser for a model, whose size decides the defaults."""
    import argparse

    from transformers import TrainingArguments

    from ..training.linearizing import Linearizing
    from ..training.presets import training_defaults
    from ..training.text import TextData

    parser = Parser(
        [Linearizing, TextData],
        TrainingArguments,
        folder="Folder for the stages, the report linearization.json, and the resulting model.",
        prog="hf-xformers linearize",
        usage=(
            "hf-xformers linearize [FILE.yaml] --model MODEL --attention NAME\n"
            "                             --output_dir DIR [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION,
    )
    for action in parser._actions:
        if action.dest in ("num_train_epochs", "max_steps"):  # which are refused, with what to give instead
            action.help = argparse.SUPPRESS
    size = size_of(first_look.get("model"))
    parser.set_defaults(**training_defaults(size), disable_tqdm=not sys.stderr.isatty())
    swap = parser.add_argument_group("attention")
    swap.add_argument(
        "--attention",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="what takes the place of softmax attention; fields as --attention.FIELD VALUE (see `hf-xformers list"
        " --components attention`)",
    )
    return parser
