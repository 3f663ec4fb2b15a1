"""What papers say about training, at small scale: sparse feed-forwards beat dense ones, pre-LN needs no warm-up.

HF_HUB_OFFLINE=1 python benchmarks/training_claims.py [--claims experts,"small start",warmup] [--seeds 0,1] [--steps N]
[--no-write]

Every model is a causal language model of hidden 64 trained from nothing on the documentation of Python's standard
library (320 tokens of vocabulary, rows of 128, 8 rows a step, no dropout, Xavier start, AdamW), with the same rows in
the same order for a seed, one thread. `loss` is that of the language model on held-out text, without the routers'
terms.

experts: a pre-LN backbone of 4 layers whose feed-forwards are dense, Switch, GShard or one product-key memory, with
    the same optimizer and number of steps (Fedus et al. 2022; Lepikhin et al. 2021; Lample et al. 2019). The networks
    are as narrow as the model, so that there is something to gain from more of them; an expert is as wide as the
    dense network. The learning rate is the dense model's best (rows of it at others show that), as it would be easy
    to beat at a lower one. Switch's experts have a capacity in training; GShard's in a causal model, and both in
    evaluation, have none, so that an output depends on earlier tokens alone (the papers do have some).
small start: the same, with a tenth of the usual variance for every weight, the dense model's too, which is how the
    Switch paper starts (Fedus et al. 2022, section 2.4).
warmup: a backbone of 6 layers with the norm after or before the sum, or ReZero; the learning rate falls linearly from
    its peak to 0, after a linear warm-up or at once (Xiong et al. 2020; Bachlechner et al. 2021). At a lower peak,
    post-LN shows when the warm-up matters.
gain, for each seed of a row in turn: how much lower its loss is than the dense model's with that rate and seed, and
    in `warmup`, than that of the same model without a warm-up.
`results/training_claims.json` keeps the rows of earlier calls that had the present settings, and seeds are added to
them; rows of other settings are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import write_results

from hf_xformers.cli.arguments import parse_command
from hf_xformers.cli.pretrain import GROUPS, make_parser, model_options
from hf_xformers.feedforward.product_key_memory import ProductKeyMemory
from hf_xformers.training import XFormerTrainer
from hf_xformers.training.preparation import Preparation, Prepared
from hf_xformers.training.pretraining import train
from hf_xformers.variants import config_class

RESULTS = Path(__file__).parent / "results" / "training_claims.json"
COLUMNS = [
    "claim",
    "model",
    "learning rate",
    "warm-up",
    "steps",
    "parameters",
    "loss",
    "spread",
    "gain",
    "seeds",
    "seconds",
]
COMMON = (
    "--variant xformer --objective clm --data stdlib --vocab_size 320 --block_size 128 --hidden_size 64 "
    "--num_attention_heads 4 --hidden_dropout_prob 0.0 --attention_probs_dropout_prob 0.0 "
    "--initializer xavier --embedding.scale true --position sinusoidal_absolute --per_device_train_batch_size 8 "
    "--eval_strategy no --save_strategy no --use_cpu true --report_to none --disable_tqdm true"
)
BACKBONES = {
    "experts": "--num_hidden_layers 4 --intermediate_size 64 --residual pre_ln",
    "warmup": "--num_hidden_layers 6 --intermediate_size 256 --feedforward relu",
}
BACKBONES["small start"] = f"{BACKBONES['experts']} --initializer t5 --initializer_factor 0.3162"  # the root of 0.1
STEPS = {"experts": 800, "small start": 800, "warmup": 400}

# Half of the layers have experts, one has a memory. What a label does not say is the component's default.
FEEDFORWARDS = {
    "dense": "relu",
    "switch_transformer": "switch_transformer",
    # The default, 0.1, is the paper's for all weights of a model (`small start`).
    "switch_transformer, init scale 1": "switch_transformer --feedforward.init_scale 1.0",
    # Queues are those of one row of 128 tokens here, in the paper those of a batch, which even out.
    "switch_transformer, init scale 1, capacity 2": (
        "switch_transformer --feedforward.init_scale 1.0 --feedforward.capacity_factor 2.0"
    ),
    "switch_transformer, capacity 2": "switch_transformer --feedforward.capacity_factor 2.0",
    "gshard_moe": "gshard_moe",
    "product_key_memory": "product_key_memory --feedforward.activation relu --feedforward.num_keys 64",
}
RESIDUALS = {3e-3: ("post_ln", "pre_ln", "rezero"), 1e-3: ("post_ln",)}  # by learning rate


@dataclass(frozen=True)
class Case:
    """One model of a claim, and how it is trained.

    memory_rate: what the learning rate is multiplied with for the values of product-key memories.
    """

    claim: str
    model: str
    rate: float
    warmup: float
    changes: str
    memory_rate: float = 1.0

    @property
    def settings(self) -> str:
        """All of it but the number of steps and the seed, as text."""
        rates = f"--learning_rate {self.rate:g} --warmup_steps {self.warmup:g}"
        memory = f" values' rate {self.memory_rate:g}" if self.memory_rate != 1 else ""
        return " ".join([COMMON, BACKBONES[self.claim], self.changes, rates]) + memory

    def arguments(self) -> list[str]:
        rates = f"--learning_rate {self.rate} --warmup_steps {self.warmup}"
        return " ".join([COMMON, BACKBONES[self.claim], self.changes, rates]).split()


SMALL_START = ("dense", "switch_transformer", "switch_transformer, capacity 2")
CASES = [
    *(
        Case("experts", model, 12e-3, 0.1, f"--feedforward {options}")
        for model, options in FEEDFORWARDS.items()
        if model != "switch_transformer, capacity 2"
    ),
    Case(
        "experts",
        "product_key_memory, 4 x rate of values",
        12e-3,
        0.1,
        f"--feedforward {FEEDFORWARDS['product_key_memory']}",
        memory_rate=4.0,
    ),
    *(Case("experts", "dense", rate, 0.1, "--feedforward relu") for rate in (8e-3, 16e-3)),
    *(Case("small start", model, 12e-3, 0.1, f"--feedforward {FEEDFORWARDS[model]}") for model in SMALL_START),
    *(Case("small start", "dense", rate, 0.1, "--feedforward relu") for rate in (8e-3, 16e-3)),
    *(
        Case("warmup", residual, rate, warmup, f"--residual {residual}")
        for rate, residuals in RESIDUALS.items()
        for warmup in (0.0, 0.25)
        for residual in residuals
    ),
]


class MemoryTrainer(XFormerTrainer):
    """Trains the values of product-key memories at `memory_rate` times the learning rate, as few tokens read any one.

    Lample et al. 2019 take 1e-3 for them and 2.5e-4 for the rest.
    """

    memory_rate = 1.0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        values = {id(module.values) for module in self.model.modules() if isinstance(module, ProductKeyMemory)}
        for group in list(optimizer.param_groups):
            memory = [parameter for parameter in group["params"] if id(parameter) in values]
            if memory and self.memory_rate != 1:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in values]
                optimizer.add_param_group({**group, "params": memory, "lr": self.memory_rate * group["lr"]})
        return optimizer


def frequency_loss(prepared: Prepared) -> float:
    """Held-out nats per token of a model that knows how frequent tokens are in the training text, and nothing else."""
    counts = np.ones(prepared.plan["vocabulary"])
    for row in prepared.train["input_ids"]:
        np.add.at(counts, row, 1)
    surprise = -np.log(counts / counts.sum())
    targets = np.concatenate([row[1:] for row in prepared.validation["input_ids"]])
    return float(surprise[targets].mean())


def trained(case: Case, steps: int, seed: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """One run's held-out loss (nats per token; None where it is not finite), parameters and processor seconds."""
    known = ["--tokenizer", str(tokenizer)] if tokenizer.exists() else []
    run = ["--max_steps", str(steps), "--seed", seed, "--output_dir", str(folder)]

    def make_trainer(**given: Any) -> XFormerTrainer:
        trainer = MemoryTrainer(**given)
        trainer.memory_rate = case.memory_rate
        return trainer

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        parsed = parse_command([*case.arguments(), *known, *run], GROUPS, make_parser)
        choice, source, _images, _recipe, _devices, args = parsed.dataclasses
        prepared = Preparation(choice, source, args, **model_options(config_class("xformer"), parsed, choice)).run()
        begun = time.process_time()
        summary = train(prepared, args, make_trainer=make_trainer)
        seconds = time.process_time() - begun
    if not known:
        folder.rename(tokenizer)  # which every other run takes it from
    loss = summary["eval_loss"]
    return {
        "loss": loss if math.isfinite(loss) else None,
        "parameters": summary["parameters"],
        "seconds": seconds,
        "frequencies": frequency_loss(prepared),
    }


def row_of(case: Case, steps: int, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """runs: seed -> what `trained` gives."""
    losses = [one["loss"] for one in runs.values()]
    finite = None not in losses
    return {
        "claim": case.claim,
        "model": case.model,
        "learning rate": f"{case.rate:g}",
        "warm-up": f"{case.warmup:.0%}",
        "steps": steps,
        "parameters": next(iter(runs.values()))["parameters"],
        "loss": statistics.mean(losses) if finite else "not finite",
        "spread": max(losses) - min(losses) if finite else None,
        "seeds": len(runs),
        "seconds": statistics.mean(one["seconds"] for one in runs.values()),
        "settings": case.settings,
        "runs": runs,
    }


def gains(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> str | None:
    """How much lower a row's loss is than that of the row it is held against, for each seed that both have.

    That is the dense model or, for a claim about warm-up, the same model without.
    """
    same = ("claim", "learning rate", "steps")
    if row["claim"] != "warmup":
        wanted = {**{name: row[name] for name in same}, "model": "dense", "warm-up": row["warm-up"]}
    else:
        wanted = {**{name: row[name] for name in same}, "model": row["model"], "warm-up": "0%"}
    for other in rows:
        if other is not row and all(other[name] == value for name, value in wanted.items()):
            pairs = [
                (other["runs"][seed]["loss"], one["loss"])
                for seed, one in row["runs"].items()
                if seed in other["runs"]
            ]
            return ", ".join(f"{base - own:+.3f}" for base, own in pairs if None not in (base, own))
    return None


def write(found: Mapping[tuple[str, int], dict[str, Any]], cases: list[Case]) -> None:
    order = [case.settings for case in cases]
    rows = sorted(found.values(), key=lambda row: (order.index(row["settings"]), row["steps"]))
    rows = [{**row, "gain": gains(row, rows)} for row in rows]
    frequencies = statistics.mean(one["frequencies"] for row in rows for one in row["runs"].values())
    write_results("training_claims", rows, COLUMNS, "What papers say about training", NOTE.format(frequencies))


NOTE = (
    "Causal language models of hidden 64 on the documentation of Python's standard library (320 tokens of vocabulary,"
    " rows of 128, 8 rows a step, no dropout, Xavier start). loss: held-out nats per token, a mean over seeds; spread:"
    " highest less lowest; seconds: of the processor, per run. A model that knows how frequent tokens are, and nothing"
    " else, has {:.2f}. gain: for each seed, how much lower the loss is than the dense model's or, in `warmup`, than"
    " without a warm-up. experts: pre-LN, 4 layers, networks of inner width 64; Switch and GShard have 8 such experts"
    " in every other layer, a product-key memory of 4096 slots stands in the third; the learning rate is the best of"
    " three for the dense model. small start: the same with a tenth of the usual variance for all weights, as in the"
    " Switch paper. warmup: 6 layers; the warm-up is a share of the steps, the learning rate falls linearly to 0 after"
    " it. Found: GShard beats the dense model with every seed, and so do product keys, by most where the values have 4"
    " times the learning rate, as in the paper. So does Switch where experts and dense networks start alike, both from"
    " the usual scale or both from a tenth of the variance, which costs either model more than experts gain; where"
    " only the experts start so low, it does not reliably. At 0.003 post-LN without a warm-up learns nothing but how"
    " frequent tokens are; it trains with one, and pre-LN and ReZero train without. At 0.001 post-LN trains without"
    " one as well."
)


def stored_rows(cases: list[Case]) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of earlier calls whose settings are still those of a case, by settings and steps."""
    known = {case.settings for case in cases}
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {(row["settings"], row["steps"]): row for row in rows if row.get("settings") in known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", default=",".join(STEPS))
    parser.add_argument("--seeds", default="0,1", help="none ('') only writes the table of the stored rows again")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--models", default="", help="only these, separated by semicolons")
    parser.add_argument("--rates", default="", help="only these learning rates, separated by commas")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    only = [name for name in options.models.split(";") if name]
    rates = [float(rate) for rate in options.rates.split(",") if rate]
    rows = stored_rows(CASES)
    with tempfile.TemporaryDirectory() as scratch:
        seeds = [seed for seed in options.seeds.split(",") if seed]
        for claim, seed in itertools.product(options.claims.split(","), seeds):
            steps = options.steps or STEPS[claim]
            for number, case in enumerate(CASES):
                if case.claim != claim or (only and case.model not in only) or (rates and case.rate not in rates):
                    continue
                one = trained(case, steps, seed, Path(scratch, "tokenizer"), Path(scratch, f"{number}-{seed}"))
                earlier = rows.get((case.settings, steps), {"runs": {}})
                rows[case.settings, steps] = row_of(case, steps, {**earlier["runs"], seed: one})
                print(json.dumps({"claim": claim, "model": case.model, "seed": seed, **one}), flush=True)
                if not options.no_write:
                    write(rows, CASES)
    if not options.no_write:
        write(rows, CASES)


if __name__ == "__main__":
    main()
