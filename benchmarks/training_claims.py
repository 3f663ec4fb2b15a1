"""What papers say about training, at small scale: conditional feed-forwards beat dense ones; pre-LN and ReZero need no warm-up.

HF_HUB_OFFLINE=1 python benchmarks/training_claims.py [--claims experts,warmup] [--seeds 0,1] [--steps N] [--no-write]

Every model is a causal language model of hidden 64 trained from nothing on the documentation of Python's standard library
(1024 tokens of vocabulary, rows of 128, 8 rows a step, no dropout, Xavier start), with the same rows in the same order for a
seed, one thread. `loss` is that of the language model on held-out text, without the routers' terms.

experts: a pre-LN backbone of 4 layers whose feed-forwards are dense, Switch, GShard or one product-key memory, with the
    same optimiser and number of steps (Fedus et al. 2022; Lepikhin et al. 2021; Lample et al. 2019).
warmup: a backbone of 12 layers with the norm after or before the sum, ReZero or Admin; the learning rate falls linearly
    from its peak to 0, after a linear warm-up or at once (Xiong et al. 2020; Bachlechner et al. 2021; Liu et al. 2020).
Seeds are added to the rows that `results/training_claims.json` has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import write_results
from uptraining import run

RESULTS = Path(__file__).parent / "results" / "training_claims.json"
COLUMNS = ["claim", "model", "learning rate", "warm-up", "steps", "parameters", "loss", "spread", "seeds", "seconds"]
KEY = ("claim", "model", "learning rate", "warm-up", "steps")
COMMON = (
    "--variant xformer --objective clm --data stdlib --vocab_size 1024 --block_size 128 --hidden_size 64 "
    "--num_attention_heads 4 --intermediate_size 256 --hidden_dropout_prob 0.0 --attention_probs_dropout_prob 0.0 "
    "--initializer xavier --embedding.scale true --position sinusoidal_absolute --per_device_train_batch_size 8 "
    "--eval_strategy no --save_strategy no --use_cpu true --report_to none --disable_tqdm true"
).split()


# Half of the layers have experts, which are as wide as the dense network. What a label does not say is the component's default.
FEEDFORWARDS = {
    "dense": ("relu",),
    "switch_transformer": ("switch_transformer",),
    "switch_transformer, capacity 2": ("switch_transformer", "--feedforward.capacity_factor", "2.0"),
    "switch_transformer, capacity 2, init scale 1": (
        *("switch_transformer", "--feedforward.capacity_factor", "2.0", "--feedforward.init_scale", "1.0"),
    ),
    "gshard_moe": ("gshard_moe",),
    "product_key_memory": ("product_key_memory", "--feedforward.activation", "relu"),
    "product_key_memory, 128 keys": (
        *("product_key_memory", "--feedforward.activation", "relu", "--feedforward.num_keys", "128"),
    ),
}
RESIDUALS = ("post_ln", "admin", "pre_ln", "rezero")


@dataclass(frozen=True)
class Case:
    """One model of a claim, and how it is trained."""

    model: str
    rate: float
    warmup: float
    options: tuple[str, ...]

    def arguments(self) -> tuple[str, ...]:
        return (*self.options, "--learning_rate", str(self.rate), "--warmup_steps", str(self.warmup))


CASES = {
    "experts": [
        Case(model, 3e-3, 0.1, ("--num_hidden_layers", "4", "--residual", "pre_ln", "--feedforward", *options))
        for model, options in FEEDFORWARDS.items()
    ],
    "warmup": [
        Case(residual, rate, warmup, ("--num_hidden_layers", "12", "--residual", residual, "--feedforward", "relu"))
        for rate in (3e-3, 1e-3)
        for warmup in (0.0, 0.25)
        for residual in RESIDUALS
    ],
}
STEPS = {"experts": 600, "warmup": 300}


def trained(arguments: tuple[Any, ...], tokenizer: Path, folder: Path) -> dict[str, Any]:
    """One run's held-out loss (nats per token; None where it is not finite), parameters and processor seconds."""
    known = ("--tokenizer", tokenizer) if tokenizer.exists() else ()
    begun = time.process_time()
    run("pretrain", *COMMON, *known, *arguments, "--output_dir", folder)
    seconds = time.process_time() - begun
    summary = json.loads((folder / "training_summary.json").read_text())
    if not tokenizer.exists():
        folder.rename(tokenizer)  # which every other run takes it from
    loss = summary["eval_loss"]
    return {
        "loss": loss if math.isfinite(loss) else None,
        "parameters": summary["parameters"],
        "seconds": seconds,
    }


def row_of(case: Case, claim: str, steps: int, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """runs: seed -> what `trained` gives."""
    losses = [one["loss"] for one in runs.values()]
    finite = None not in losses
    return {
        "claim": claim,
        "model": case.model,
        "learning rate": f"{case.rate:g}",
        "warm-up": f"{case.warmup:.0%}",
        "steps": steps,
        "parameters": next(iter(runs.values()))["parameters"],
        "loss": statistics.mean(losses) if finite else "not finite",
        "spread": max(losses) - min(losses) if finite else None,
        "seeds": len(runs),
        "seconds": statistics.mean(one["seconds"] for one in runs.values()),
        "runs": runs,
    }


def write(rows: list[dict[str, Any]]) -> None:
    note = (
        "Causal language models of hidden 64 on the documentation of Python's standard library (rows of 128 tokens, 8 rows a "
        "step, no dropout, Xavier start). loss: held-out nats per token, a mean over seeds; spread: highest less lowest; "
        "seconds: of the processor, per run. experts: pre-LN, 4 layers; Switch and GShard have 8 experts in every other "
        "layer, a product-key memory stands in one. warmup: 12 layers; the warm-up is a share of the steps, the learning "
        "rate falls linearly to 0 after it."
    )
    write_results("training_claims", rows, COLUMNS, "What papers say about training", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", default=",".join(CASES))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--models", default="", help="only these, separated by semicolons")
    parser.add_argument("--rates", default="", help="only these learning rates, separated by commas")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    only = [name for name in options.models.split(";") if name]
    rates = [float(rate) for rate in options.rates.split(",") if rate]
    stored = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {tuple(row[part] for part in KEY): row for row in stored}
    with tempfile.TemporaryDirectory() as scratch:
        for claim, seed in itertools.product(options.claims.split(","), options.seeds.split(",")):
            steps = options.steps or STEPS[claim]
            for number, case in enumerate(CASES[claim]):
                if (only and case.model not in only) or (rates and case.rate not in rates):
                    continue
                arguments = (*case.arguments(), "--max_steps", steps, "--seed", seed)
                one = trained(arguments, Path(scratch, "first"), Path(scratch, f"{claim}-{number}-{seed}"))
                row = row_of(case, claim, steps, {seed: one})
                key = tuple(row[part] for part in KEY)
                if key in rows:
                    row = row_of(case, claim, steps, {**rows[key]["runs"], seed: one})
                rows[key] = row
                print(json.dumps(row), flush=True)
                if not options.no_write:
                    write(list(rows.values()))


if __name__ == "__main__":
    main()
