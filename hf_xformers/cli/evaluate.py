# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers evaluate`: loss, perplexity and token accuracy of a saved model on text."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Parser, named_option, parse_command, parse_objective
from .console import is_main_process, print_facts, share_text
from .pretrain import quiet_libraries, row_facts, target_of

_DESCRIPTION = """Evaluate a saved model on what it was trained to predict, or on another objective of its head.

Data and rows are by default those of the model's training, so that the figures compare with its log; masks and spans
are the same in every call.

A model that was fine-tuned on a task is measured on that task's rows, with options of its own, which `hf-xformers
evaluate --model DIR --help` explains."""
# The options of Trainer that an evaluation reads.
READ = (
    "bf16",
    "bf16_full_eval",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "ddp_backend",
    "disable_tqdm",
    "fp16",
    "fp16_full_eval",
    "per_device_eval_batch_size",
    "seed",
    "tf32",
    "torch_compile",
    "use_cpu",
)


def run(argv: Sequence[str]) -> int:
    from ..finetuning.trained import does_a_task

    model = named_option(argv, "model")
    if model is not None and does_a_task(model):
        from .predict import run_evaluation

        return run_evaluation(argv)
    from ..training.scoring import choose_objective, evaluate, load_config, training_of

    parsed = parse_command(argv, ("objective",), make_parser)
    score, source, args = parsed.dataclasses
    settings = parsed.groups.get("objective", {})
    fields: dict[str, Any] = {}
    if set(settings) - {"type"}:
        chosen = choose_objective(load_config(score.model), score.objective, {}, training_of(score.model))
        fields = parse_objective(chosen.id, settings)
    quiet_libraries(args)
    figures = evaluate(score, source, args, objective_fields=fields)
    if score.json:
        if is_main_process():
            print(json.dumps(figures, indent=2))
    else:
        report(figures)
    return 0


def report(figures: Mapping[str, Any]) -> None:
    """The figures in words, with what token frequencies alone reach below each that has such a baseline."""
    from ..training.trainer_evaluation import FURTHER_LABELS

    target = target_of(figures["objective"])
    beside = {
        "loss": (f"... of {target} frequencies alone", figures["baseline_loss"]),
        "accuracy": (f"... of always the most frequent {target}", share_text(figures["baseline_accuracy"])),
    }
    of_rows = row_facts(figures)
    apart = tuple(f"{before}{kind}_" for kind in FURTHER_LABELS for before in ("", "baseline_"))
    figures = {name: value for name, value in figures.items() if not name.startswith(apart)}
    texts = {
        "objective": figures["objective"]["type"],
        "data": " ".join(figures["data"]),
        "accuracy": share_text(figures["accuracy"]),
    }
    facts: dict[str, Any] = {}
    for name, value in figures.items():
        if name not in ("baseline_loss", "baseline_accuracy"):
            words = f"{name.removeprefix('aux_')} (held out)" if name.startswith("aux_") else name.replace("_", " ")
            facts[words] = texts.get(name, value)
        if name in beside:
            facts[beside[name][0]] = beside[name][1]
    print_facts("evaluated", {**facts, **of_rows})


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    from transformers import TrainingArguments

    from ..training.presets import training_defaults
    from ..training.scoring import Score, text_of, training_of
    from ..training.text import TextData

    parser = Parser(
        [Score, TextData],
        TrainingArguments,
        read=READ,
        prog="hf-xformers evaluate",
        usage="hf-xformers evaluate [FILE.yaml] --model MODEL [OPTION VALUE ...]",
        description=_DESCRIPTION,
    )
    trained = training_of(first_look["model"]) if first_look.get("model") else {}
    shared = training_defaults("small")
    # Nothing is written; Trainer wants a folder all the same.
    defaults = {
        "output_dir": tempfile.gettempdir(),
        **{name: shared[name] for name in ("report_to", "remove_unused_columns", "dataloader_pin_memory")},
        "seed": trained.get("seed", 42),
        **text_of(trained),
    }
    if trained.get("eval_streams"):  # how many texts are read side by side decides where each begins
        defaults["per_device_eval_batch_size"] = trained["eval_streams"]
    parser.set_defaults(**defaults, disable_tqdm=not sys.stderr.isatty())
    return parser
