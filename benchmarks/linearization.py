"""What it costs to give a trained model a constant state, and what it brings.

A small decoder made as current language models are (rotary positions, RMS norms before the sublayers, SwiGLU, grouped
heads, no biases) is trained on the text that comes with Python and linearized with several mechanisms, with at most
15 % of its training steps. "recovered" is the part of the gap between swap and source that is closed: (swap - loss) /
(swap - source), on held-out text. Next to it stands the linear model trained from nothing for as many steps as all
stages have. Then each model, in a process of its own, reads contexts of growing length and continues, token by token:
tokens per second, bytes that its state has, and the most memory that the process had at any time.

python benchmarks/linearization.py [--steps 4000] [--transfer N] [--distillation N] [--work DIR]
    [--mechanisms hedgehog,t2r,lolcats,...] [--contexts 512,1024,...] [--no-write]

A smoke run: --steps 20 --transfer 2 --distillation 1 --contexts 64,128 --mechanisms hedgehog --no-write
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine
from transformers import AutoModelForCausalLM

import hf_xformers  # noqa: F401  (registers the variants)
from hf_xformers.benchmark import tables
from hf_xformers.benchmark.measure import state_tensors
from hf_xformers.cli import main as command
from hf_xformers.conversion.linearization import read_linearization
from hf_xformers.core.cache import make_cache
from hf_xformers.core.saved_files import write_text

MODEL = {
    "objective": "clm",
    "position": "rotary",
    "position.layout": "half",
    "attention.bias": "false",
    "normalization": "rms_norm",
    "residual": "pre_ln",
    "feedforward": "swiglu",
    "feedforward.bias": "false",
    "num_key_value_heads": 2,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 176,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
COMMON = {
    "block_size": 128,
    "per_device_train_batch_size": 8,
    "eval_strategy": "no",
    "disable_tqdm": "true",
}
MECHANISMS: dict[str, dict[str, Any]] = {
    # As many features as heads of 64 have, which Hedgehog was proposed with; heads are narrow here.
    "hedgehog": {"attention": "hedgehog", "attention.num_features": 64},
    "hedgehog-16": {"attention": "hedgehog"},
    # Its features are a ReLU's, half of which are 0: it takes more of them to come as near.
    "t2r": {"attention": "t2r", "attention.num_features": 256},
    "performer": {"attention": "performer", "attention.num_features": 64, "attention.redraw_interval": 0},
    "lolcats": {"attention": "lolcats", "attention.window": 64},
}
# Steps of transfer and of distillation, and the rate of the latter, unless options say otherwise: T2R has no stage of
# transfer in its paper (Kasai et al. 2021), and learns most in the second one.
SCHEDULES: dict[str, tuple[int, int, float]] = {"t2r": (50, 550, 6e-3)}
SCHEDULE = (150, 450, 4e-3)
NEW_TOKENS = 16


def run(name: str, *flags: str, **options: Any) -> None:
    """A command of the package, quietly; its output is shown when it fails."""
    words = [name, *(word for key, value in options.items() for word in (f"--{key}", str(value))), *flags]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command([*words, *([] if torch.cuda.is_available() else ["--use_cpu"])])
    if code:
        raise SystemExit(output.getvalue())


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    """The figures of a model that `pretrain` makes in `folder`, if it has not been there."""
    summary = folder / "training_summary.json"
    if not summary.exists() or "eval_loss" not in json.loads(summary.read_text()):
        run("pretrain", output_dir=folder, size="tiny", save_strategy="no", **MODEL, **COMMON, **options)
    return json.loads(summary.read_text())


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def losses(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    source = trained(work / "source", max_steps=options.steps, learning_rate=options.learning_rate)
    rows: list[dict[str, Any]] = []
    for name in options.mechanisms.split(","):
        folder, begun = work / name, processor_seconds()
        transfer, distillation, rate = schedule(name, options)
        steps = transfer + distillation
        record = read_linearization(folder)
        if record is None or record.status != "finished":
            run(
                "linearize",
                "--resume_from_checkpoint",
                output_dir=folder,
                model=work / "source",
                transfer_steps=transfer,
                distillation_steps=distillation,
                distillation_learning_rate=rate,
                **COMMON,
                **MECHANISMS[name],
            )
            record = read_linearization(folder)
        assert record is not None
        seconds = processor_seconds() - begun
        anew = trained(
            work / f"{name}-anew",
            max_steps=steps,
            learning_rate=options.learning_rate,
            tokenizer=work / "source",
            **MECHANISMS[name],
        )
        stages = {stage.name: stage.loss for stage in record.stages}
        part = record.recovered(record.stages[-1].loss)
        rows.append(
            {
                "mechanism": name,
                "steps": f"{transfer} + {distillation} of {options.steps}",
                "learning rates": " + ".join(f"{stage.learning_rate:g}" for stage in record.stages),
                "token frequencies": record.baseline_loss,
                "source": source["eval_loss"],
                "after the swap": record.swapped_loss,
                "after the transfer": stages.get("transfer"),
                "after the distillation": stages.get("distillation"),
                "recovered": None if part is None else f"{100 * part:.1f} %",
                "from nothing, as many steps": anew["eval_loss"],
                "trained in the transfer": record.stages[0].trained,
                "processor seconds": round(seconds, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


def schedule(name: str, options: argparse.Namespace) -> tuple[int, int, float]:
    """Steps of the two stages, and the rate of the second one."""
    own = SCHEDULES.get(name, SCHEDULE)
    given = (options.transfer, options.distillation, options.distillation_rate)
    transfer, distillation, rate = (mine if asked is None else asked for mine, asked in zip(own, given, strict=True))
    return int(transfer), int(distillation), rate


@torch.inference_mode()
def generation(folder: Path, context: int) -> dict[str, Any]:
    """Reading `context` tokens and writing more: seconds, tokens per second, bytes of the state."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (1, context))
    cache = make_cache(model.config)
    begun = time.perf_counter()
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    read = time.perf_counter() - begun
    for _ in range(4):  # the first steps are slower
        token = model(token, past_key_values=cache).logits.argmax(-1)
    begun = time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = model(token, past_key_values=cache).logits.argmax(-1)
    seconds = time.perf_counter() - begun
    return {
        "seconds to read": read,
        "tokens per second": NEW_TOKENS / seconds,
        "state, bytes": state_bytes(cache),
        "process peak, MiB": peak_mebibytes(),
    }


def peak_mebibytes() -> int:
    """The most memory that this process has had at any time, the libraries that it began with included."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) // 1024


def state_bytes(cache: Any) -> int:
    """Of all tensors that a generation cache holds."""
    return sum(tensor.nbytes for tensor in state_tensors(cache))


def decoding(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    kept = work / "generation.json"  # what an earlier call with --work has measured
    rows = json.loads(kept.read_text()) if kept.exists() else []
    done = {(row["model"], row["context"]) for row in rows}
    processes = multiprocessing.get_context("forkserver")  # each begins with the libraries loaded and nothing else
    processes.set_forkserver_preload(["linearization"])
    with processes.Pool(1, maxtasksperchild=1) as pool:
        for context in map(int, options.contexts.split(",")):
            for name in ("source", *options.mechanisms.split(",")):
                if (name, context) in done:
                    continue
                found = pool.apply(generation, (work / name, context))
                rows.append({"model": name, "context": context, **found})
                kept.write_text(json.dumps(rows))
                print(rows[-1], flush=True)
    return sorted(rows, key=lambda row: row["context"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--transfer", type=int, help="steps of the first stage")
    parser.add_argument("--distillation", type=int, help="steps of the second stage")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--distillation-rate", type=float)
    parser.add_argument("--mechanisms", default="hedgehog,t2r,lolcats")
    parser.add_argument("--contexts", default="512,2048,8192,16384")
    parser.add_argument(
        "--work", type=Path, help="folder to keep the models in; what is there is not trained or measured again"
    )
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        quality, speed = losses(options, work), decoding(options, work)
    if options.no_write:
        return
    note = (
        f"A decoder (3 layers of width 64, rotary positions, RMS norms, SwiGLU, 4 heads over 2 of keys and values, no"
        f" biases, 1,024 tokens) trained for {options.steps} steps of 8 rows of 128 tokens on the documentation of"
        " Python's standard library, and linearized in at most 15 % of its steps. Losses are held-out nats per"
        " token. The source was not trained to its end, so that a part of what the distillation gains is what more"
        " training brings to any model. Generation reads one row of random tokens, longer than those that the model"
        " was trained on: it tells time and memory alone. The peak includes the libraries, which every process has."
    )
    where = machine()
    sections = {"Losses": quality, "Generation, one row of text": speed}
    folder = Path(__file__).parent / "results"
    tables.write_dated(folder / "linearization.json", {"machine": where, **sections})
    parts = ["# Linearization of a trained model", note, tables.about(where)]
    for title, rows in sections.items():
        shown = tables.folded([rounded(row) for row in rows], list(rows[0]), f"linearization/{title}")
        parts += [f"## {title}", shown]
    write_text(folder / "linearization.md", "\n\n".join(parts) + "\n")


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Losses with three decimals: the gaps are small."""
    return {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
