"""What a swap of components costs, and how soon training makes up for it.

A BERT is trained on the text that comes with Python, its attention is swapped, and the result is trained for a tenth of the
steps, alone and with the source as teacher. "recovered" is the part of the masked-LM gap between a random model and the
source that is closed: (random - loss) / (random - source), on held-out text.

python benchmarks/uptraining.py [--size small] [--steps 4000] [--swaps band_attention,longformer,num_key_value_heads]
python benchmarks/uptraining.py --conversion     # time and memory of a swap of BERT-base, alone

A smoke run: --size tiny --steps 40 --hidden-size 32 --layers 1 --block-size 32 --batch-size 4 --no-write
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import _status, machine, write_results

import hf_xformers  # noqa: F401  (registers the variants)
from hf_xformers.cli import main as command
from hf_xformers.conversion import swap_checkpoint

# What is swapped: label -> changes. Windows are short against the rows, so that most pairs of tokens are lost.
SWAPS: dict[str, dict[str, Any]] = {
    "band_attention": {"attention": {"type": "band_attention", "window_size": 16}},
    "longformer": {"attention": {"type": "longformer", "attention_window": 32}},
    "num_key_value_heads": {"num_key_value_heads": 1},
    "performer": {"attention": "performer"},
    "rotary": {"position": "rotary"},
}


def run(*arguments: Any) -> None:
    """A command of the package, quietly; its output is shown when it fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command([str(argument) for argument in arguments])
    if code:
        raise SystemExit(output.getvalue())


def evaluated(folder: Path) -> float:
    """Held-out loss, nats per masked token."""
    return json.loads((folder / "training_summary.json").read_text())["eval_loss"]


def uptraining(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    shape = ["--block_size", options.block_size] if options.block_size else []
    geometry = [
        f"--{name}={value}"
        for name, value in (("hidden_size", options.hidden_size), ("num_hidden_layers", options.layers))
        if value
    ]
    if options.batch_size:
        shape += ["--per_device_train_batch_size", options.batch_size]
    common = [
        "--data",
        options.data,
        "--save_strategy",
        "no",
        "--eval_strategy",
        "no",
        "--disable_tqdm",
        "true",
        *shape,
    ]
    common += [] if torch.cuda.is_available() else ["--use_cpu"]
    source = work / "source"
    start = ["pretrain", "--variant", "bert", "--objective", "mlm", "--size", options.size, *geometry]
    run(*start, *common, "--output_dir", source, "--max_steps", options.steps)
    # the loss before any training: one step without a learning rate
    still = ["--max_steps", 1, "--learning_rate", 0.0, "--weight_decay", 0.0]
    run(*start, *common, "--tokenizer", source, "--output_dir", work / "random", *still)
    random, best = evaluated(work / "random"), evaluated(source)
    rows = []
    for name in options.swaps.split(","):
        swapped = work / name
        begun = time.perf_counter()
        report = swap_checkpoint(source, swapped, **SWAPS[name])
        seconds = time.perf_counter() - begun
        again = ["uptrain", "--model", swapped, *common, "--output_dir"]
        run(*again, work / f"{name}-still", *still)
        steps = max(1, options.steps // 10)
        run(*again, work / f"{name}-alone", "--max_steps", steps)
        run(*again, work / f"{name}-taught", "--max_steps", steps, "--teacher", source)
        losses = {
            what: evaluated(work / f"{name}-{place}")
            for what, place in (("swapped", "still"), ("uptrained", "alone"), ("with teacher", "taught"))
        }
        row = {"swap": name, "random": random, "source": best, **losses, "steps": f"{steps} of {options.steps}"}
        for what in ("swapped", "uptrained", "with teacher"):
            row[f"recovered {what}"] = f"{100 * (random - losses[what]) / (random - best):.1f} %"
        row["KL at the swap"] = report.movement.kl_mean
        row["seconds to swap"] = seconds
        rows.append(row)
        print(row, flush=True)
    return rows


def conversion(work: Path) -> dict[str, Any]:
    """Seconds and peak memory of `swap_checkpoint` for a BERT-base, as a multiple of its weights."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig())
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(work / "base")
    del model
    import gc

    gc.collect()
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before, begun = _status("VmRSS"), time.perf_counter()
    swap_checkpoint(work / "base", work / "long", attention={"type": "longformer"}, max_length=4096)
    seconds, grown = time.perf_counter() - begun, _status("VmHWM") - before
    return {"weights, MB": size / 1e6, "seconds": seconds, "peak / weights": grown / size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--swaps", default="band_attention,longformer,num_key_value_heads")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--conversion", action="store_true", help="time and memory of a BERT-base swap instead")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.conversion:
            found = conversion(Path(folder))
            print(machine(), found)
            return
        rows = uptraining(options, Path(folder))
    if options.no_write:
        return
    columns = list(rows[0])
    write_results(
        "uptraining",
        rows,
        columns,
        "Uptraining after a swap of components",
        f"A {options.size} BERT trained for {options.steps} steps on the documentation of Python's standard library; masked-LM "
        "losses on held-out text (nats per masked token) of a random model, the source, the swapped model before training, "
        "and after a tenth of the steps, alone and with the source as teacher. Recovered: the part of the gap between random "
        "and source that is closed.",
    )


if __name__ == "__main__":
    main()
