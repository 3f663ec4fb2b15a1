"""How much states of growing size recall: multi-query associative recall, over mechanisms, widths and seeds.

HF_HUB_OFFLINE=1 python benchmarks/recall.py [--widths 16,32] [--seeds 0,1,2] [--steps 1000] [--print]

`hf-xformers benchmark --train_only --tasks mqar` trains a small causal model for each, in one to two minutes of a
core. Rows of other widths that were measured with as many steps stay.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from measure import write_results

from hf_xformers.cli import main as command
from hf_xformers.hub.sweep import best_of_sweep

LENGTH, LAYERS, HEADS = 64, 2, 2
VARIANT = "gated_delta_net"  # around every mechanism
AROUND = {"position": "sinusoidal_absolute", "embedding": "short_convolution"}
ENTRIES: dict[str, dict[str, Any]] = {
    "sliding window of 8": {"attention": "sliding_window", "attention.window": 8, "attention.sinks": 0},
    "linear attention": {"attention": "linear_transformer"},
    "RetNet": {"attention": "retnet"},
    "DeltaNet": {"attention": "delta_net"},
    "gated DeltaNet": {"attention": "gated_delta_net", "attention.key_width": "head", "attention.value_width": "head"},
}
SOFTMAX = "softmax attention"
COLUMNS = ["width", "mechanism", "state", "accuracy", "lowest", "highest", "chance"]
TITLE = "What states recall"
NOTE = (
    f"Multi-query associative recall (Arora et al. 2023): rows of {LENGTH} tokens with 8 pairs of keys and values,"
    f" each key asked for later on. Causal models of {LAYERS} layers and {HEADS} heads, alike but for their attention"
    " (pre-LN, RMSNorm, SwiGLU, sinusoidal positions and a convolution over four tokens at the input), trained for"
    " equal steps of 64 new rows at a rate of 0.005. `state`: numbers that generation keeps of all layers; that of"
    " softmax attention grows, and is the one at the end of a row. accuracy: share of held-out values that are named,"
    " a mean over seeds, which set weights and rows; `lowest` and `highest` of them. Runs that end near"
    " .47 have learned a part of the task by then. `chance`: always naming the most frequent value."
)


def trained(width: int, seeds: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of the command at one width; `head` stands for the width of a head."""
    names = {f"entry_{number}": label for number, label in enumerate(ENTRIES)}
    words = "benchmark --import short_convolution --causal --train_only --tasks mqar --no_maps --timeout 3600".split()
    words += ["--variants", ",".join(f"{name}={VARIANT}" for name in names)]
    for name, label in names.items():
        for key, value in {**AROUND, **ENTRIES[label]}.items():
            words += ["--set", f"{name}.{key}={width // HEADS if value == 'head' else value}"]
    words += f"--train_length {LENGTH} --train_layers {LAYERS} --train_heads {HEADS} --learning_rate 0.005".split()
    words += ["--train_hidden_size", str(width), "--seed", seeds, "--steps", str(steps), "--output_dir", str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    if command(words):
        raise SystemExit(f"this did not run: hf-xformers {' '.join(words)}")
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [{**row, "label": names.get(row["label"], SOFTMAX)} for row in rows if row["kind"] == "quality"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="16,32")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--print", action="store_true", help="print rows and write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        widths = map(int, arguments.widths.split(","))
        found = [trained(width, arguments.seeds, arguments.steps, Path(folder) / str(width)) for width in widths]
    rows = table([row for rows in found for row in rows], arguments.steps)
    print(json.dumps(rows, indent=1))
    if not arguments.print:
        measured = {row["width"] for row in rows}
        stored = json.loads((Path(__file__).parent / "results" / "recall.json").read_text())["rows"]
        rows += [row for row in stored if row["width"] not in measured and row["steps"] == arguments.steps]
        rows.sort(key=lambda row: (row["width"], -row["accuracy"]))
        write_results("recall", rows, [*COLUMNS, "parameters", "seeds", "steps"], TITLE, NOTE)


def table(runs: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """A row for each mechanism and width."""
    parameters = {(row["label"], row["point"]["hidden_size"]): row["parameters"] for row in runs}
    return [
        {
            **{"width": row["hidden size"], "mechanism": row["label"], "state": row["state size"]},
            **{"accuracy": row["accuracy"], "lowest": row["lowest"], "highest": row["highest"]},
            **{"chance": row["chance accuracy"], "parameters": parameters[row["label"], row["hidden size"]]},
            **{"seeds": row["runs"], "steps": steps},
        }
        for row in best_of_sweep(runs)
    ]


if __name__ == "__main__":
    main()
