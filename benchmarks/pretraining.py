"""Validation loss of variants against the dense baseline, at equal steps and at equal time.

HF_HUB_OFFLINE=1 python benchmarks/pretraining.py [--corpora stdlib,shakespeare,wikitext2] [--only xf_performer,...] [--steps 200]

Every variant is pretrained from nothing at size tiny (hidden 128, four layers) by `hf-xformers pretrain`, on the
same rows in the same order, one thread. Masked language models are compared with `bert`, causal ones with `gpt2`, span
corruption with `t5`. `loss` is the held-out loss (nats per target) after all steps; `at equal time` is the loss that the
baseline had reached in the processor time that the variant's run took (at most after all its steps), by linear
interpolation between its evaluations. `dense on its stack` is the loss of the variant's own preset with dense attention, where
attention is what the variant changes: what remains of the difference to `dense loss` there is the preset's (where layers are
normalised, how weights start) and not the mechanism's. Rows that `results/pretraining.json` has already (same steps) are not run again.
`stdlib` is the corpus that comes with Python; the others are read from $HF_XFORMERS_DATA.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import write_results

TWIN = "dense on its stack"
COLUMNS = [
    "variant",
    "corpus",
    "objective",
    "steps",
    "loss at start",
    "loss",
    "dense loss",
    TWIN,
    "dense, at equal time",
    "time ratio",
]
BASELINES = {"mlm": "xf_bert", "clm": "xf_gpt2", "span": "xf_t5"}


@dataclass(frozen=True)
class Corpus:
    """file: below $HF_XFORMERS_DATA, or empty for the corpus of the package; vocabulary: ids of the tokenizer."""

    file: str
    vocabulary: int

    def data(self) -> str:
        return str(Path(os.environ["HF_XFORMERS_DATA"]) / self.file) if self.file else "stdlib"


CORPORA = {
    "stdlib": Corpus("", 2048),
    "shakespeare": Corpus("tinyshakespeare/input.txt", 368),  # bytes, special tokens and sentinels: character level
    "wikitext2": Corpus("wikitext2/train.txt", 2048),
}
# Mechanism parameters for rows of 128 tokens, where the papers' would read everything.
OPTIONS = {
    "xf_longformer": ["--attention.attention_window", "32"],
    "xf_bigbird": ["--attention.block_size", "16"],
    "xf_sparse_transformer": ["--attention.stride", "16"],
    "xf_reformer": ["--attention.chunk_length", "16"],
    "xf_routing_transformer": ["--attention.window_size", "16"],
    "xf_linformer": ["--attention.projected_length", "32"],
    "xf_nystromformer": ["--attention.num_landmarks", "16"],
    "xf_luna": ["--attention.projected_length", "16"],
    "xf_performer": ["--attention.num_features", "64"],
}


def objective_for(variant: str, corpus: str) -> str | None:
    """What a variant is compared on: causal models first on characters, masked ones first on words."""
    from hf_xformers.variants import config_class

    heads = config_class(variant).heads
    wanted = [("mlm", "ForMaskedLM"), ("clm", "ForCausalLM"), ("span", "ForSeq2SeqLM")]
    if corpus == "shakespeare":
        wanted.insert(0, wanted.pop(1))
    return next((name for name, head in wanted if head in heads), None)


def dense_twin(variant: str) -> tuple[list[str], str] | None:
    """Options that give the variant dense attention, and what remains of its preset at this size, as text; None where attention
    is not what it changes or brings its positions along."""
    from hf_xformers.training.presets import size_fields
    from hf_xformers.variants import config_class

    made = config_class(variant)
    default = made().to_dict()
    attention = default["attention"]
    if not isinstance(attention, dict) or attention["type"] in ("dense", "transformer_xl", "complex_order"):
        return None
    fields = size_fields(made, "tiny", two_towers=False)
    try:
        config = made(attention="dense", cross_attention="dense", **fields).to_dict()
    except ValueError:
        return None
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return ["--attention", "dense"], json.dumps(rest, sort_keys=True, default=str)


def train(
    variant: str, objective: str, corpus: str, steps: int, folder: str, tokenizer: str | None, options: list[str]
) -> dict[str, Any]:
    """Evaluations (step, loss) of one run and its processor seconds, in a fork of this process; or `error`, a line."""
    command = ["pretrain", "--variant", variant, "--objective", objective, "--data", CORPORA[corpus].data()]
    command += ["--vocab_size", str(CORPORA[corpus].vocabulary), *(["--tokenizer", tokenizer] if tokenizer else [])]
    command += ["--size", "tiny", "--output_dir", folder, "--max_steps", str(steps), "--use_cpu", "true"]
    command += ["--block_size", "128", "--eval_strategy", "steps", "--eval_steps", str(max(steps // 4, 1))]
    command += ["--per_device_train_batch_size", "8", "--eval_on_start", "true", "--save_strategy", "no"]
    command += ["--report_to", "none", "--seed", "0", "--disable_tqdm", "true", *options]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_train, args=(command, folder, queue))
    child.start()
    made = queue.get()
    child.join()
    return made


def _train(command: list[str], folder: str, queue: Any) -> None:
    from transformers import TrainerCallback

    from hf_xformers.cli import pretrain

    class Clock(TrainerCallback):
        seconds = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = -time.process_time()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds += time.process_time()

    clock = Clock()
    try:
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            pretrain.run(command[1:], callbacks=[clock])
        history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
        evaluations = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
        queue.put({"evaluations": evaluations, "seconds": clock.seconds})
    except BaseException as error:  # the parent goes on with the other variants and reports this one
        queue.put({"error": f"{type(error).__name__}: {error}"[-300:]})


def at_seconds(run: dict[str, Any], seconds: float) -> float:
    """The loss of a run after so much processor time, taking every step to cost the same."""
    points = run["evaluations"]
    step = points[-1][0] * min(seconds / run["seconds"], 1.0)
    for (low, first), (high, second) in itertools.pairwise(points):
        if step <= high:
            return first + (second - first) * (step - low) / max(high - low, 1)
    return points[-1][1]


def write(rows: list[dict[str, Any]]) -> None:
    note = (
        "Held-out loss after a few hundred steps from nothing at size tiny (hidden 128, 4 layers, rows of 128 tokens, "
        "8 rows a step), beside dense attention's: bert for masked, gpt2 for causal language models, t5 for span "
        f"corruption; `{TWIN}`: the variant's own preset with dense attention, where attention is what it changes. "
        "At this length nothing sub-quadratic is expected to be faster."
    )
    write_results("pretraining", rows, COLUMNS, "Pretraining against the dense baseline", note)


def main() -> None:
    from hf_xformers.variants import config_class, model_types

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", default="stdlib")
    parser.add_argument("--only", default="", help="model types, separated by commas; default: all that read text")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    variants = [name for name in arguments.only.split(",") if name] or [
        name for name in model_types() if name != "xformer" and config_class(name).modality == "text"
    ]
    stored = Path(__file__).parent / "results" / "pretraining.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    baselines: dict[tuple[str, str, str], dict[str, Any]] = {}
    import hf_xformers.training.trainer  # noqa: F401  (imported once, before the forks)

    with tempfile.TemporaryDirectory() as scratch:
        for corpus, variant in itertools.product(arguments.corpora.split(","), variants):
            objective = objective_for(variant, corpus)
            steps = arguments.steps
            if objective is None:
                continue
            known = [row for row in rows if (row["variant"], row["corpus"], row["steps"]) == (variant, corpus, steps)]
            twin = dense_twin(variant)
            if known and (twin is None or known[0].get(TWIN) is not None):
                continue
            start = f"{scratch}/{corpus}-{objective}"
            baseline = BASELINES[objective]
            key = (corpus, objective, baseline)
            if key not in baselines:
                dense = train(baseline, objective, corpus, steps, start, None, OPTIONS.get(baseline, []))
                if "error" in dense:
                    raise RuntimeError(dense["error"])
                baselines[key] = dense
            dense = baselines[key]
            if twin is not None and (corpus, objective, twin[1]) not in baselines:
                with tempfile.TemporaryDirectory() as folder:
                    made = train(variant, objective, corpus, steps, f"{folder}/run", start, twin[0])
                if "error" in made:
                    print(f"{variant} with dense attention on {corpus}: {made['error']}", flush=True)
                baselines[corpus, objective, twin[1]] = made
            same = baselines[corpus, objective, twin[1]].get("evaluations", [(0, None)])[-1][1] if twin else None
            if known:
                known[0][TWIN] = same
                print(variant, corpus, known[0]["loss"], TWIN, same, flush=True)
                write(rows)
                continue
            with tempfile.TemporaryDirectory() as folder:
                run = train(variant, objective, corpus, steps, f"{folder}/run", start, OPTIONS.get(variant, []))
            if "error" in run:
                print(f"{variant} on {corpus}: {run['error']}", flush=True)
                continue
            row = {
                "variant": variant,
                "corpus": corpus,
                "objective": objective,
                "steps": arguments.steps,
                "loss at start": run["evaluations"][0][1],
                "loss": run["evaluations"][-1][1],
                "dense loss": dense["evaluations"][-1][1],
                TWIN: same,
                "dense, at equal time": at_seconds(dense, run["seconds"]),
                "time ratio": run["seconds"] / dense["seconds"],
            }
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            rows = [r for r in rows if (r["variant"], r["corpus"]) != (variant, corpus)] + [row]
            rows.sort(key=lambda r: (r["corpus"], r["objective"], r["variant"]))
            write(rows)


if __name__ == "__main__":
    main()
