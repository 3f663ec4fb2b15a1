# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers uptrain`: continue the pretraining of a model whose components were swapped."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.components import SLOTS, build_spec
from .arguments import Parser, parse_command, parse_objective
from .console import in_options, say
from .pretrain import OUTPUT_HELP, amount, quiet_libraries, report, tell_new_head

_DESCRIPTION = """Continue the pretraining of a saved model, e.g. after `hf-xformers convert --attention ...`, on its
own objective and tokenizer. With --teacher the model also learns to predict as another one does, which the source of
the swap is made for; --hidden_weight adds the teacher's hidden states.

FILE.yaml has the options by name. Works unchanged under a launcher:

  accelerate launch -m hf_xformers.cli uptrain ..."""

# What `pretrain` calls the model to start from.
_OPTIONS = {"--init_from": "--model"}
_FREE_MIX = "xformer"


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..training.uptraining import objective_of, prepare, uptrain

    parsed = parse_command(argv, ("objective",), make_parser)
    choice, distillation, source, devices, args = parsed.dataclasses
    settings = parsed.groups.get("objective", {})
    objective = parse_objective(choice.objective or objective_of(choice.model), settings)
    quiet_libraries(args)
    with in_options(_OPTIONS):
        preparation = prepare(choice, source, args, objective_fields=objective)
        devices.check_devices(preparation.config, args.world_size)
    tell_new_head(choice.model, preparation)

    def tell(prepared: Any) -> None:
        plan = prepared.plan
        teacher = "" if distillation.teacher is None else f", teacher {distillation.teacher}"
        kind = kind_of(choice.model, prepared.config.model_type)
        say(
            f"{choice.model} ({kind}), objective {plan['objective']['type']}{teacher}: "
            f"{amount(plan['train_rows'])} rows of {plan['block_size']} tokens to train on, "
            f"{amount(plan['validation_rows'])} held out"
        )
        if prepared.checkpoint is not None:
            say(f"resuming from {prepared.checkpoint}")

    with in_options(_OPTIONS):
        summary = uptrain(preparation, distillation, args, callbacks=callbacks, on_prepared=tell, devices=devices)
    kind = kind_of(choice.model, summary["variant"])
    report({**summary, "variant": kind}, str(args.output_dir), "uptrained")
    return 0


def kind_of(model: str, variant: str) -> str:
    """What a model is, in words: its variant, or, of a free mix that was made by swapping components, the variant it
    was made of and what it has instead."""
    from ..conversion.provenance import read_provenance

    swapped = read_provenance(model) if variant == _FREE_MIX else None
    if swapped is None:
        return "xformer, the free mix" if variant == _FREE_MIX else variant
    steps = swapped.steps()
    put_in = {slot: after for step in steps for slot, (_, after) in step.changes.items() if slot in SLOTS}
    kinds = [f"{slot.replace('_', '-')} {build_spec(slot, after).type}" for slot, after in put_in.items()]
    return f"a free mix: {steps[0].variants[0]}" + (f" with {', '.join(kinds)}" if kinds else "")


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser for a model, whose size decides the defaults."""
    from transformers import TrainingArguments

    from ..training.devices import DeviceOptions
    from ..training.distillation import Distillation
    from ..training.preparation import ModelChoice, chosen_size
    from ..training.presets import training_defaults
    from ..training.text import TextData
    from ..training.uptraining import Uptraining

    parser = Parser(
        [Uptraining, Distillation, TextData, DeviceOptions],
        TrainingArguments,
        folder=OUTPUT_HELP,
        prog="hf-xformers uptrain",
        usage=(
            "hf-xformers uptrain [FILE.yaml] --model DIR --output_dir DIR\n"
            "                           [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION,
    )
    start = first_look.get("model")
    parser.set_defaults(disable_tqdm=not sys.stderr.isatty(), eval_on_start=True)
    parser.set_defaults(**training_defaults("tiny" if start is None else chosen_size(ModelChoice(init_from=start))))
    return parser
