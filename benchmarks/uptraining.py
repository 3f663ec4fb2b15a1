"""What a swap of components costs, and how soon training makes up for it.

A BERT is trained on the text that comes with Python, its attention is swapped, and the result is trained for a tenth
of the steps, alone and with the source as teacher. "recovered" is the part of the masked-LM gap between a random model
and the source that is closed: (random - loss) / (random - source), on held-out text. Next to it stands what the same
tenth of the steps makes of a random BERT.

python benchmarks/uptraining.py [--size small] [--steps 4000] [--swaps band_attention,longformer,num_key_value_heads]
    [--learning-rate 2e-3] [--work DIR] [-- OPTION ...]      # OPTION: further ones of `hf-xformers pretrain` for the
    source
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
    "longformer": {"attention": {"type": "longformer", "attention_window": 8}},
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


def trained(folder: Path, *arguments: Any) -> float:
    """Held-out loss, nats per masked token, of the model that a command trains in `folder`, if it has not been
    there."""
    summary = folder / "training_summary.json"
    if not summary.exists() or "eval_loss" not in json.loads(summary.read_text()):
        run(*arguments, "--output_dir", folder, "--overwrite_output_dir", "true")
    return json.loads(summary.read_text())["eval_loss"]


def uptraining(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    common = "--save_strategy no --eval_strategy no --report_to none --disable_tqdm true".split()
    common += ["--data", options.data, *([] if torch.cuda.is_available() else ["--use_cpu"])]
    given = {"block_size": options.block_size, "per_device_train_batch_size": options.batch_size}
    common += [f"--{name}={value}" for name, value in given.items() if value]
    rate = [f"--learning_rate={options.learning_rate}"] if options.learning_rate else []
    geometry = {
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.layers,
        "vocab_size": options.vocab_size,
    }
    start = ["pretrain", "--variant", "bert", "--objective", "mlm", "--size", options.size, *common, *options.extra]
    start += [f"--{name}={value}" for name, value in geometry.items() if value]
    few = ["--max_steps", max(1, options.steps // 10), *rate]
    # the loss before any training: one step without a learning rate
    still = ["--max_steps", 1, "--learning_rate", 0.0, "--weight_decay", 0.0]
    source = work / "source"
    best = trained(source, *start, "--max_steps", options.steps, *rate)
    random = trained(work / "random", *start, "--tokenizer", source, *still)
    anew = trained(work / "anew", *start, "--tokenizer", source, *few)

    def recovered(loss: float) -> str:
        return f"{100 * (random - loss) / (random - best):.1f} %"

    rows = []
    for name in options.swaps.split(","):
        swapped = work / name
        begun = time.perf_counter()
        report = swap_checkpoint(source, swapped, overwrite=True, **SWAPS[name])
        seconds = time.perf_counter() - begun
        again = ["uptrain", "--model", swapped, *common]
        losses = {
            "swapped": trained(work / f"{name}-still", *again, *still),
            "uptrained": trained(work / f"{name}-alone", *again, *few),
            "with teacher": trained(work / f"{name}-taught", *again, *few, "--teacher", source),
        }
        row = {"swap": name, "steps": f"{few[1]} of {options.steps}", "random": random, "source": best, **losses}
        row |= {f"recovered {what}": recovered(loss) for what, loss in losses.items()}
        row |= {"random, as many steps": recovered(anew)}
        rows.append({**row, "KL at the swap": report.movement.kl_mean, "seconds to swap": seconds})
        print(rows[-1], flush=True)
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
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--learning-rate", type=float, help="peak of all trainings; default: that of the size")
    parser.add_argument(
        "--work", type=Path, help="folder to keep the models in; those that are there are not trained again"
    )
    parser.add_argument("--conversion", action="store_true", help="time and memory of a BERT-base swap instead")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("extra", nargs="*", help="after --: further options of `hf-xformers pretrain` for the source")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.conversion:
            found = conversion(Path(folder))
            print(machine(), found)
            return
        rows = uptraining(options, options.work or Path(folder))
    if options.no_write:
        return
    columns = list(rows[0])
    settings = f"size {options.size}" + "".join(
        f", {name.replace('_', ' ')} {value:g}"
        for name in ("hidden_size", "layers", "vocab_size", "batch_size", "block_size", "learning_rate")
        if (value := getattr(options, name)) is not None
    )
    write_results(
        "uptraining",
        rows,
        columns,
        "Uptraining after a swap of components",
        f"A BERT ({' '.join([settings, *options.extra])}) trained for {options.steps} steps on the documentation of"
        " Python's standard library; masked-LM losses on held-out text (nats per masked token) of a random model, the"
        " source, the swapped model before training, and after a tenth of the steps, alone and with the source as"
        " teacher. Recovered: the part of the gap between random and source that is closed; the same of the random"
        " model trained for a tenth of the steps.",
    )


if __name__ == "__main__":
    main()
