"""Does every architecture convert, both ways, with equal outputs, and in how much time and memory?

python benchmarks/conversion.py [--only bert,llama] [--without_base]

For each model type in `tests/conversion/architectures/`: over all classes, the largest difference of outputs and of
losses between transformers' tiny model and ours, relative to the largest output, and between ours and what it converts
back to; then a base-sized checkpoint is converted in a fresh process, from folder to folder: processor seconds, and
the growth of the process's peak memory by the size of the weights. Rows replace those of the same model type in
`results/conversion.json`; runs from the root of the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))

import torch
import transformers
from measure import _status, write_results
from transformers.utils import logging

from hf_xformers.conversion import convert_checkpoint, converter_for, from_transformers, to_transformers
from tests.conversion.architectures import LENGTH, Architecture, architectures
from tests.conversion.test_architectures import differences

RESULTS = Path(__file__).parent / "results" / "conversion.json"
COLUMNS = [
    "family",
    "becomes",
    "classes",
    "outputs",
    "losses",
    "back",
    "base, M",
    "processor seconds",
    "memory / weights",
]
WHOLE = (LENGTH, LENGTH, LENGTH)


def calls(name: str) -> Iterator[tuple[Architecture, Any, list[dict[str, Any]]]]:
    """Tiny models of a family with their heads, and what each is given."""
    entry = architectures()[name]
    for head in entry.heads:
        model, sides = entry.make(head), ("right",) if head in entry.first_slot else entry.sides
        given = entry.given(head, lengths=WHOLE)
        labels = {} if head in entry.unpadded_losses else entry.labels(head, given, model.config.num_labels)
        yield entry, model, [entry.given(head, side) for side in sides] + [{**given, **labels}]


def row(name: str) -> dict[str, Any]:
    worst = {"outputs": 0.0, "losses": 0.0, "back": 0.0}
    classes: dict[str, None] = {}
    for entry, model, inputs in calls(name):
        ours = from_transformers(model)
        back = to_transformers(ours, model_type=entry.model_type)
        classes[type(model).__name__] = None
        for given in inputs:
            for kind, other in (("outputs", model), ("back", back)):
                for output, value in differences(entry, other, ours, given).items():
                    column = "losses" if output == "loss" and kind == "outputs" else kind
                    worst[column] = max(worst[column], value)
    found = {"family": name, "becomes": converter_for(entry.model_type).variant, "classes": len(classes), **worst}
    return {key: f"{value:.0e}" if isinstance(value, float) else value for key, value in found.items()}


# ------------------------------------------------------------------------------------------------ base size


def base_model(name: str) -> Any:
    """A base-sized model of transformers with a head, if the family has one that we have too."""
    entry = architectures()[name]
    head = next((head for head, ours in entry.heads.items() if ours != "Model"), next(iter(entry.heads)))
    config_class = type(transformers.AutoConfig.for_model(entry.model_type))
    config = config_class(**{**entry.settings.get(head, {}), **entry.base})
    return getattr(transformers, head)(config)


def _convert(source: str, target: str, found: Any) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    transformers.AutoConfig.from_pretrained(source)  # modules are not what is measured
    with open("/proc/self/clear_refs", "w") as counter:
        counter.write("5")
    before, begun = _status("VmRSS"), time.process_time()
    convert_checkpoint(source, target)
    found.put((time.process_time() - begun, _status("VmHWM") - before))


def base_row(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = base_model(name)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        model.save_pretrained(Path(folder) / "theirs")
        count = sum(tensor.numel() for tensor in model.parameters()) / 1e6
        del model
        gc.collect()
        context = multiprocessing.get_context("spawn")
        found = context.Queue()
        paths = [os.fspath(Path(folder) / part) for part in ("theirs", "ours")]
        process = context.Process(target=_convert, args=(*paths, found))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"converting a base-sized {name} failed; see above")
        seconds, growth = found.get()
    return {"base, M": round(count), "processor seconds": seconds, "memory / weights": growth / weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="model types, with commas between")
    parser.add_argument("--without_base", action="store_true", help="leave the base-sized checkpoint out")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logging.get_logger("hf_xformers.conversion").setLevel("ERROR")  # what reports say is no news here
    names = arguments.only.split(",") if arguments.only else sorted(architectures())
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
    rows = {entry["family"]: entry for entry in old}
    note = (
        "`outputs`, `losses`: largest difference between transformers' model and ours over all classes, relative to"
        " the largest value, in float32 on random tiny models with padding; `back`: the same after converting back."
        " Base-sized checkpoints from folder to folder: millions of weights, processor seconds, peak memory by the"
        " size of the weights."
    )
    for name in names:  # a killed run keeps what it has
        print(name, flush=True)
        rows[name] = {**row(name), **({} if arguments.without_base else base_row(name))}
        ordered = [rows[name] for name in sorted(rows)]
        write_results("conversion", ordered, COLUMNS, "Conversion of transformers' families", note)


if __name__ == "__main__":
    main()
