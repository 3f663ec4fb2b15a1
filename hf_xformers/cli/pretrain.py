# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers pretrain`: train a variant, or a free mix of components, on text or images."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.components import SLOTS
from .arguments import (
    Parser,
    add_model_options,
    parse_changes,
    parse_command,
    parse_fields,
    parse_objective,
)
from .console import print_facts, say, share_text

if TYPE_CHECKING:
    from ..configuration_xformer import XFormerConfig
    from ..training.preparation import Prepared

_DESCRIPTION = """Pretrain a variant on text or images and save it, ready for from_pretrained.

FILE.yaml has the options by name, components nested. Works unchanged under a launcher:

  accelerate launch -m hf_xformers.cli pretrain ..."""
OUTPUT_HELP = "Folder for the model, its checkpoints, log and figures."
GROUPS = (*SLOTS, "objective", "decoder")


def run(argv: Sequence[str], callbacks: Sequence[Any] = ()) -> int:
    """callbacks: further Trainer callbacks, for programs that call this."""
    from ..training.image_pretraining import reads_images, refuse_image_options
    from ..training.preparation import Preparation
    from ..training.pretraining import train

    parsed = parse_command(argv, GROUPS, make_parser)
    choice, source, images, recipe, devices, args = parsed.dataclasses
    recipe.check(args)
    config_class = _config_class(choice)
    if reads_images(config_class, source.data, images):
        return _run_on_images(parsed, config_class, callbacks)
    refuse_image_options(images)
    preparation = Preparation(choice, source, args, **model_options(config_class, parsed, choice))
    devices.check_devices(preparation.config, args.world_size)
    quiet_libraries(args)
    tell_new_head(choice.init_from, preparation)
    with preparation.this_run.lock():
        prepared = preparation.run()
        _tell(prepared)
        summary = train(prepared, args, callbacks, recipe=recipe, devices=devices.devices())
    report(summary, str(args.output_dir))
    return 0


def _run_on_images(parsed: Any, config_class: type[XFormerConfig], callbacks: Sequence[Any]) -> int:
    from pathlib import Path

    from ..training.image_pretraining import ImagePreparation, usual_objective
    from ..training.pretraining import train

    choice, source, images, recipe, devices, args = parsed.dataclasses
    devices.refuse("sequence_parallel", "divides texts, and images are read whole")
    if recipe.max_tokens:
        raise ValueError("--max_tokens sorts texts by length, and images have one; leave it out")
    usual = choice.objective or usual_objective(config_class)
    options = model_options(config_class, parsed, choice, objective=usual)
    preparation = ImagePreparation(choice, source, images, args, **options)
    quiet_libraries(args)
    with preparation.this_run.lock():
        prepared = preparation.run()
        plan = prepared.plan
        height, width = prepared.size
        tokens = f"{plan['vocabulary']} colors" if plan["vocabulary"] else "patches"
        say(
            f"{prepared.config.model_type}, objective {plan['objective']['type']}: {plan['train_rows']:,} images of"
            f" {height} x {width} pixels to train on, {plan['validation_rows']:,} held out, as {plan['block_size']:,}"
            f" tokens ({tokens})"
        )
        if prepared.checkpoint is not None:
            say(f"resuming from {prepared.checkpoint}")
        summary = train(
            prepared,
            args,
            callbacks,
            make_trainer=prepared.make_trainer(),
            recipe=recipe,
            devices=devices.devices(),
        )
        drawn = prepared.write_pictures(args.seed, Path(str(args.output_dir))) if args.should_save else None
    report(summary, str(args.output_dir), further={} if drawn is None else {"pictures": str(drawn)})
    return 0


def _tell(prepared: Prepared) -> None:
    config, plan = prepared.config, prepared.plan
    say(
        f"{config.model_type}, objective {plan['objective']['type']}: {amount(plan['train_rows'])} rows of"
        f" {plan['block_size']} tokens to train on, {amount(plan['validation_rows'])} held out, {plan['vocabulary']:,}"
        " tokens in the vocabulary"
    )
    if plan["train_streams"] is not None:
        say(
            f"in {plan['train_streams']} streams of text, each row with the memory of the one before"
            " (--segment_streams)"
        )
    if prepared.checkpoint is not None:
        say(f"resuming from {prepared.checkpoint}")


def tell_new_head(source: str | None, preparation: Any) -> None:
    """Says, before anything is prepared, which head of the model to start from is not there."""
    if preparation.new_head and preparation.checkpoint is None:
        head = f"For{preparation.objective.head}"
        say(f"{source} has no trained head {head}: {', '.join(preparation.new_head)} start untrained")


def amount(rows: int | None) -> str:
    """A number of rows as it is shown; a stream does not know its own."""
    return "streamed" if rows is None else f"{rows:,}"


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    """The parser for a variant and a size, whose defaults and fields differ."""
    from transformers import TrainingArguments

    from ..training.devices import DeviceOptions
    from ..training.image_pretraining import ImageData
    from ..training.preparation import ModelChoice, chosen_size
    from ..training.presets import training_defaults
    from ..training.recipe import Recipe
    from ..training.text import TextData

    parser = Parser(
        [ModelChoice, TextData, ImageData, Recipe, DeviceOptions],
        TrainingArguments,
        folder=OUTPUT_HELP,
        prog="hf-xformers pretrain",
        usage="hf-xformers pretrain [FILE.yaml] --output_dir DIR [OPTION VALUE ...]",
        description=_DESCRIPTION,
    )
    look = first_look.get
    choice = ModelChoice(variant=look("variant"), init_from=look("init_from"), size=look("size"))
    parser.set_defaults(**training_defaults(chosen_size(choice)), disable_tqdm=not sys.stderr.isatty())
    add_model_options(parser, _config_class(choice))
    return parser


def _config_class(choice: Any) -> type[XFormerConfig]:
    from ..training.run_folder import saved_config
    from ..variants import config_class, model_types

    name = choice.variant
    if not name and choice.init_from:
        saved = saved_config(choice.init_from).get("model_type")
        name = saved if saved in model_types() else None  # another one is refused where the run is prepared
    return config_class(name or "xformer")


def model_options(
    config_class: type[XFormerConfig], parsed: Any, choice: Any, objective: str | None = None
) -> dict[str, Any]:
    """What `Preparation` takes besides the dataclasses: components, fields and objective settings, typed. objective:
    the one of the run; by default that chosen, or the variant's usual one."""
    from ..training.building import default_objective
    from ..training.run_folder import saved_config

    groups = {name: dict(texts) for name, texts in parsed.groups.items()}
    settings = groups.pop("objective", {})
    # Fields without a component's name are about the components that the saved model has. A model of another type is
    # refused where the run is prepared.
    same = bool(choice.init_from) and saved_config(choice.init_from).get("model_type") == config_class.model_type
    components = parse_changes(config_class.from_pretrained(choice.init_from) if same else config_class, groups)
    fields = parse_fields(config_class, parsed.namespace)
    if "decoder" in components:
        fields["decoder"] = components.pop("decoder")
    return {
        "components": components,
        "fields": fields,
        "objective_fields": parse_objective(
            objective or choice.objective or default_objective(config_class), settings
        ),
    }


def quiet_libraries(args: Any) -> None:
    """Progress bars of data preparation only where there is somebody to see them."""
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading and saving, which would break that of training
    if args.disable_tqdm or not args.should_save:
        datasets.disable_progress_bars()


def size_of(model: str | None) -> str:
    """The size whose settings suit a saved model; tiny for a Hub id, and for what is refused with a better word when
    it is opened."""
    from ..training.presets import nearest_size
    from ..training.run_folder import saved_config

    try:
        return "tiny" if model is None else nearest_size(saved_config(model).get("hidden_size"))
    except ValueError:
        return "tiny"


def report(
    summary: Mapping[str, Any], folder: str, title: str = "pretrained", further: Mapping[str, Any] | None = None
) -> None:
    shares = {name: share_text(value) for name, value in summary.items() if name.endswith("accuracy")}
    target = target_of(summary["objective"])
    target = "color" if summary.get("reads") == "images" and target == "token" else target
    trivial = "the median picture" if target == "patch" else f"{target} frequencies alone"
    facts = {
        "variant": summary["variant"],
        "objective": summary["objective"]["type"],
        "parameters": summary["parameters"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "training loss (last logged)": summary["train_loss"],
        "held-out loss before": summary.get("start_loss"),
        "held-out loss": summary.get("eval_loss"),
        f"... of {trivial}": summary.get("eval_baseline_loss"),
        "held-out perplexity": summary.get("eval_perplexity"),
        "held-out accuracy before": shares.get("start_accuracy"),
        "held-out accuracy": shares.get("eval_accuracy"),
        f"... of always the most frequent {target}": shares.get("eval_baseline_accuracy"),
        **row_facts({name.removeprefix("eval_"): value for name, value in summary.items()}),
        **{
            name.removeprefix("eval_aux_") + " (held out)": value
            for name, value in summary.items()
            if name.startswith("eval_aux_")
        },
        **(further or {}),
        "saved in": folder,
    }
    print_facts(title, facts)
    loss, baseline = summary.get("eval_loss"), summary.get("eval_baseline_loss")
    if loss is not None and baseline is not None and loss >= baseline:
        say(
            f"It predicts no better than {trivial} so far: train longer. docs/guides/pretrain.md says what makes a"
            " small model learn sooner."
        )


def target_of(objective: Mapping[str, Any]) -> str:
    """What one of the things that an objective predicts is called."""
    from ..objectives import build_objective

    return build_objective(objective).target


def row_facts(figures: Mapping[str, Any]) -> dict[str, str]:
    """Held-out accuracy of labels next to those of tokens, and that of always the most frequent one."""
    from ..training.trainer_evaluation import FURTHER_LABELS

    facts = {}
    for kind in FURTHER_LABELS:
        if f"{kind}_accuracy" in figures:
            name = kind.replace("_", " ")
            facts[f"{name} accuracy (held out)"] = share_text(figures[f"{kind}_accuracy"])
            facts[f"... of always the most frequent {name} label"] = share_text(figures[f"baseline_{kind}_accuracy"])
    return facts
