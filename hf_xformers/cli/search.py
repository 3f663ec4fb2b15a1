# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers search`: find the operations of a DARTSformer by gradient descent."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Parser, add_model_options, parse_command
from .console import print_facts, show
from .pretrain import GROUPS, OUTPUT_HELP, model_options, quiet_libraries

_DESCRIPTION = """Search for the operation of each part of a layer. All candidates run, weighed by a softmax of learned
numbers; these learn on held-out text, everything else on training text, by turns. At the end the heaviest operations
make a model with new weights, in the folder derived: train it with `hf-xformers pretrain --init_from DIR/derived`.

--block.candidates NAME,NAME narrows what is searched, --num_hidden_layers says how many layers differ, and
--derived_layers how many the derived model has, which repeat them. A search that was stopped continues with
--resume_from_checkpoint.

FILE.yaml has the options by name, components nested."""


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..training.architecture_search import DERIVED, search
    from ..variants import config_class

    parsed = parse_command(argv, GROUPS, make_parser)
    searching, choice, source, args = parsed.dataclasses
    choice.variant = choice.variant or "dartsformer"
    quiet_libraries(args)
    result = search(
        searching,
        choice,
        source,
        args,
        **model_options(config_class(choice.variant), parsed, choice),
        callbacks=callbacks,
    )
    summary, found = result["summary"], result["found"]
    facts = {
        "objective": summary["objective"]["type"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "held-out loss, all operations at once": summary.get("eval_loss"),
        "... of token frequencies alone": summary.get("eval_baseline_loss"),
        "derived model in": f"{args.output_dir}/{DERIVED}",
    }
    print_facts("searched", facts)
    for name, layers in found.items():
        for number, parts in enumerate(layers):
            texts = [f"{part['operation']} ({max(part['shares'].values()):.0%})" for part in parts]
            show(f"{name.removesuffix('s').replace('_', ' ')} {number}: {', '.join(texts)}", indent=2, hanging=2)
    return 0


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser; the size decides the defaults of training."""
    from transformers import TrainingArguments

    from ..training.architecture_search import Searching
    from ..training.preparation import ModelChoice, chosen_size
    from ..training.presets import training_defaults
    from ..training.text import TextData
    from ..variants import config_class

    parser = Parser(
        [Searching, ModelChoice, TextData],
        TrainingArguments,
        folder=OUTPUT_HELP,
        prog="hf-xformers search",
        usage="hf-xformers search [FILE.yaml] --output_dir DIR [OPTION VALUE ...]",
        description=_DESCRIPTION,
    )
    look = first_look.get
    size = chosen_size(ModelChoice(init_from=look("init_from"), size=look("size")))
    parser.set_defaults(**training_defaults(size), disable_tqdm=not sys.stderr.isatty())
    add_model_options(parser, config_class(look("variant") or "dartsformer"))
    return parser
