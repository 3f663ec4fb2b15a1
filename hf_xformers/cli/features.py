# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers features`: hidden states of a model that stays as it is, to files; and a linear probe on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.saved_files import write_json
from .arguments import Parser, parse_command
from .console import is_main_process, print_facts, say, share_text

_DESCRIPTION = """Write hidden states of a saved model, of chosen layers, pooled or by token, to Parquet or safetensors
files; the model is not trained. It reads texts, or images where the model does. A run that was stopped continues where
it was. For example:

  hf-xformers features --model runs/bert --data texts.csv --output features --layers embedding last last4
  hf-xformers features --model runs/bert --data train.csv test.csv --output features --probe label
  hf-xformers features --model runs/image_gpt --data FOLDER_OF_IMAGES --output features --layers 0 1 2 --probe label"""


def run(argv: Sequence[str]) -> int:
    import datasets
    from rich.progress import Progress
    from transformers.utils.logging import disable_progress_bar

    from ..finetuning.features import extract, prepare, remove_earlier
    from ..finetuning.probe import probe
    from ..training.folder_lock import folder_lock
    from .console import error_console

    options, source = parse_command(argv, (), make_parser).dataclasses
    datasets.disable_progress_bars()
    disable_progress_bar()
    made = prepare(options, source)
    if not is_main_process():
        return 0
    total = sum(map(len, made.texts.values()))
    with folder_lock(options.output, option="--output"):
        remove_earlier(made)
        missing = made.missing
        there = sum(map(len, made.files.values())) - len(missing)
        if there:
            say(f"{there} of {there + len(missing)} files are there already")
        with Progress(console=error_console(), disable=not options.progress, transient=True) as bar:
            size = options.rows_per_file
            left = sum(min(size, len(made.texts[split]) - index * size) for split, index in missing)
            task = bar.add_task("rows", total=left)
            extract(made, lambda rows: bar.advance(task, rows))
        figures = probe(made) if options.probe is not None else None
    facts: dict[str, Any] = {
        "model": options.model,
        "variant": made.reader.config.model_type,
        "rows": f"{total:,} ({', '.join(f'{len(rows):,} {name}' for name, rows in made.texts.items())})",
        "columns": ", ".join(made.reader.choice.columns),
        "pooled": options.pool,
        "files": sum(map(len, made.files.values())),
    }
    if figures is not None:
        facts["probe of"] = f"{figures['label']}, {figures['classes']} classes"
        for split in filter(figures.__contains__, made.texts):
            for layer, value in figures[split]["accuracy"].items():
                baseline = share_text(figures[split]["baseline"])
                facts[f"accuracy of {layer} ({split})"] = f"{share_text(value)} (baseline {baseline})"
        facts["baseline"] = figures["baseline_rule"]
        if "mix" in figures:
            facts["weights of the mix"] = ", ".join(f"{value:.3f}" for value in figures["mix"]["weights"])
            facts["its scores"] = "--mix_scores " + " ".join(f"{value:g}" for value in figures["mix"]["scores"])
        write_json(Path(options.output).expanduser() / "probe.json", figures)
    print_facts("features", {**facts, "saved in": options.output})
    return 0


def make_parser(first_look: Mapping[str, Any]) -> Parser:
    from ..finetuning.features import FeatureOptions
    from ..finetuning.options import TaskData

    return Parser(
        [FeatureOptions, TaskData],
        prog="hf-xformers features",
        usage=(
            "hf-xformers features [FILE.yaml] --model MODEL --data FILE\n"
            "                            --output DIR [OPTION VALUE ...]"
        ),
        description=_DESCRIPTION,
    )
