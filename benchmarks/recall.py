"""Which state of a given size recalls more: multi-query associative recall, after equal steps.

HF_HUB_OFFLINE=1 python benchmarks/recall.py [--steps 400] [--seeds 0,1,2] [--print]

`hf-xformers benchmark --train_only --tasks mqar` trains a small causal model of each mechanism for every seed, which
sets weights and rows. `state` is what generation keeps of each layer, in numbers, whatever the length. About a minute
of one core for a mechanism and seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import write_results

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.cli import main as command
from hf_xformers.core.cache import make_cache

LENGTH, WIDTH, LAYERS, HEADS = 64, 64, 2, 2
BASE = ("gated_delta_net", {"position": "sinusoidal_absolute"})  # the same around every mechanism
HEAD = {"key_width": WIDTH // HEADS, "value_width": WIDTH // HEADS}
# What is compared, by its label: attentions whose states are alike but for a denominator and a window.
ENTRIES: dict[str, dict[str, Any]] = {
    "linear_attention": {"type": "linear_transformer"},
    "gated_delta_net": {"type": "gated_delta_net", **HEAD},
}
SOFTMAX = "softmax_attention"
BESIDE = ["chance", "loss", "seconds"]
COLUMNS = ["mechanism", "state", "parameters", "steps", "accuracy", "spread"]
TITLE = "What states of one size recall"
NOTE = (
    f"Multi-query associative recall (Arora et al. 2023): rows of {LENGTH} tokens with 8 pairs of keys and values,"
    f" each key asked for later on. Causal models of width {WIDTH}, {LAYERS} layers and {HEADS} heads, alike but for"
    " their attention (pre-LN, RMSNorm, SwiGLU, sinusoidal positions at the input), trained for equal steps of 64 new"
    " rows at a rate of 0.002. `state`: numbers that generation keeps of a layer at any length, 2,048 of them a"
    " memory, the others a denominator or a window of a short convolution; softmax attention keeps keys and values of"
    " every token. accuracy: share of held-out values that are named, a mean over seeds, which set weights and rows;"
    " spread: highest less lowest. `chance`: always naming the most frequent value. seconds: of the processor, a"
    " run's, next to other work. With every seed the gated delta net is above linear attention. None has learned"
    " the task by then, not even softmax attention, whose state has no limit: this is how soon, not how much."
)


def numbers_kept(attention: dict[str, Any]) -> int:
    """Numbers in the state of a layer."""
    sizes = {"vocab_size": 24, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    config = XFormerConfig(**sizes, attention=attention, is_decoder=True)
    cache = make_cache(config)
    with torch.no_grad():
        XFormerModel(config).eval()(torch.zeros(1, 3, dtype=torch.long), past_key_values=cache, use_cache=True)
    layer: Any = cache.layers[0]
    return sum(tensor.numel() for tensor in layer.state.values())


def trained(seed: int, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The row of each label for one seed, and that of softmax attention."""
    words = "benchmark --causal --train_only --tasks mqar --no_maps --timeout 3600 --variants".split()
    words.append(",".join(f"{label}={BASE[0]}" for label in ENTRIES))
    for label, attention in ENTRIES.items():
        inside = {"attention" if name == "type" else f"attention.{name}": value for name, value in attention.items()}
        for name, value in {**BASE[1], **inside}.items():
            words += ["--set", f"{label}.{name}={value}"]
    words += (
        f"--train_length {LENGTH} --train_hidden_size {WIDTH} --train_layers {LAYERS} --train_heads {HEADS}".split()
    )
    words += ["--steps", str(steps), "--seed", str(seed), "--output_dir", str(folder)]
    if command(words):
        raise SystemExit(f"this did not run: hf-xformers {' '.join(words)}")
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return {row["label"] if row["label"] in ENTRIES else SOFTMAX: row for row in rows if row["kind"] == "quality"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--print", action="store_true", help="print rows and write nothing")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        runs = [trained(seed, arguments.steps, Path(folder) / str(seed)) for seed in seeds]
    rows = []
    for label in (*ENTRIES, SOFTMAX):
        found = [run[label] for run in runs]
        accuracies = [row["accuracy"] for row in found]
        rows.append(
            {
                "mechanism": label.replace("_", " "),
                **({"state": numbers_kept(ENTRIES[label])} if label in ENTRIES else {}),
                "parameters": found[0]["parameters"],
                "steps": arguments.steps,
                "accuracy": statistics.mean(accuracies),
                "spread": max(accuracies) - min(accuracies),
                **{f"seed {seed}": accuracy for seed, accuracy in zip(seeds, accuracies)},
                "chance": statistics.mean(row["chance accuracy"] for row in found),
                "loss": statistics.mean(row["loss"] for row in found),
                "seconds": statistics.mean(row["seconds"] for row in found),
            }
        )
    print(json.dumps(rows, indent=1))
    if not arguments.print:
        columns = [*COLUMNS, *(f"seed {seed}" for seed in seeds), *BESIDE]
        write_results("recall", rows, columns, TITLE, NOTE)


if __name__ == "__main__":
    main()
