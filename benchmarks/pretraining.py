"""Validation loss of variants against the dense baseline, at equal steps and at equal time.

python benchmarks/pretraining.py [--corpora stdlib,shakespeare,wikitext2] [--only xf_performer,...] [--steps 200]

Every variant is pretrained from nothing at size tiny (hidden 128, four layers) by `hf-xformers pretrain`, on the
same rows in the same order, one thread. Masked language models are compared with `bert`, causal ones with `gpt2`, span
corruption with `t5`. `loss` is the held-out loss (nats per target) after all steps; `at equal time` is the loss that the
baseline had reached in the processor time that the variant's run took (at most after all its steps), by linear
interpolation between its evaluations.
`stdlib` is the corpus that comes with Python; the others are read from $HF_XFORMERS_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import write_results

ROOT = Path(__file__).resolve().parent.parent
BASELINES = {"mlm": "xf_bert", "clm": "xf_gpt2", "span": "xf_t5"}
FILES = {"shakespeare": "tinyshakespeare/input.txt", "wikitext2": "wikitext2/train.txt"}
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


def objectives(variant: str) -> list[str]:
    """What a variant is compared on: the first objective that it fits."""
    from hf_xformers.variants import config_class

    heads = config_class(variant).heads
    wanted = (("mlm", "ForMaskedLM"), ("clm", "ForCausalLM"), ("span", "ForSeq2SeqLM"))
    return [name for name, head in wanted if head in heads][:1]


def train(variant: str, objective: str, corpus: str, steps: int, folder: str) -> dict[str, Any] | str:
    """Evaluations (step, loss) of one run and its processor seconds, or the last line of its error."""
    if corpus == "stdlib":
        data = ["--data", "stdlib"]
    else:
        data = ["--data", str(Path(os.environ["HF_XFORMERS_DATA"]) / FILES[corpus])]
    command = [sys.executable, "-m", "hf_xformers.cli", "pretrain", "--variant", variant, "--objective", objective]
    command += [*data, "--size", "tiny", "--output_dir", folder, "--max_steps", str(steps), "--use_cpu", "true"]
    command += ["--block_size", "128", "--eval_strategy", "steps", "--eval_steps", str(max(steps // 4, 1))]
    command += ["--eval_on_start", "true", "--save_strategy", "no", "--report_to", "none", "--seed", "0"]
    command += ["--disable_tqdm", "true", *OPTIONS.get(variant, [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = os.times()
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][-300:]
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return {"evaluations": [(e["step"], e["eval_loss"]) for e in history if "eval_loss" in e], "seconds": seconds}


def at_seconds(run: dict[str, Any], seconds: float) -> float:
    """The loss of a run after so much processor time, taking every step to cost the same."""
    points = run["evaluations"]
    step = points[-1][0] * min(seconds / run["seconds"], 1.0)
    for (low, first), (high, second) in itertools.pairwise(points):
        if step <= high:
            return first + (second - first) * (step - low) / max(high - low, 1)
    return points[-1][1]


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
    baselines: dict[tuple[str, str], dict[str, Any]] = {}
    for corpus in arguments.corpora.split(","):
        for variant in variants:
            for objective in objectives(variant):
                with tempfile.TemporaryDirectory() as folder:
                    key = (corpus, objective)
                    if key not in baselines:
                        made = train(BASELINES[objective], objective, corpus, arguments.steps, f"{folder}/baseline")
                        if isinstance(made, str):
                            raise RuntimeError(made)
                        baselines[key] = made
                    dense = baselines[key]
                    run = train(variant, objective, corpus, arguments.steps, f"{folder}/run")
                if isinstance(run, str):
                    print(f"{variant} on {corpus}: {run}", flush=True)
                    continue
                row = {
                    "variant": variant,
                    "corpus": corpus,
                    "objective": objective,
                    "steps": arguments.steps,
                    "loss at start": run["evaluations"][0][1],
                    "loss": run["evaluations"][-1][1],
                    "dense loss": dense["evaluations"][-1][1],
                    "dense, at equal time": at_seconds(dense, run["seconds"]),
                    "time ratio": run["seconds"] / dense["seconds"],
                }
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                rows = [r for r in rows if (r["variant"], r["corpus"]) != (variant, corpus)] + [row]
                rows.sort(key=lambda r: (r["corpus"], r["objective"], r["variant"]))
                note = (
                    "Held-out loss after a few hundred steps from nothing at size tiny (hidden 128, 4 layers, rows of 128 tokens, "
                    "16 rows a step), beside dense attention's: bert for masked, gpt2 for causal language models, t5 for span "
                    "corruption. At this length nothing sub-quadratic is expected to be faster."
                )
                write_results("pretraining", rows, list(row), "Pretraining against the dense baseline", note)


if __name__ == "__main__":
    main()
