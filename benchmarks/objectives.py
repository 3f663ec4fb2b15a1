"""What does an encoder learn from each objective, and what is it then worth for another task?

HF_XFORMERS_DATA=... HF_HUB_OFFLINE=1 python benchmarks/objectives.py [--only mlm,tlm] [--steps 400] [--print]

Every objective trains a small model (width 64, two layers) by `hf-xformers pretrain`: on the documentation that comes
with Python, those of parallel text on Multi30k. `loss` is next to its trivial baseline, what the frequencies of the
targets alone reach; where an objective predicts something besides tokens (how a pair belongs together, which name was
replaced, which phrase was masked), that has a loss and a baseline of its own. `beats the baseline` says whether every
loss is lower than its baseline by more than 2 %. Then the encoder (of a decoder the decoder) reads SST-2, sentiment of
sentences from films: a linear probe on the mean of its frozen states, and fine-tuning of all weights for a few steps,
each against the same model from random weights with equal steps, and against the majority. SST-2 and Multi30k are read
from $HF_XFORMERS_DATA. Rows of earlier runs stay: an objective that has one does not run again, unless --only names
it. A row takes one to three minutes of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import write_results
from torch import Tensor, nn

from hf_xformers.cli import main as command
from hf_xformers.objectives import OBJECTIVES, build_objective
from hf_xformers.training.building import objectives_for
from hf_xformers.training.trainer_evaluation import FURTHER_LABELS
from hf_xformers.variants import config_class, family, model_types

DATA = Path(os.environ.get("HF_XFORMERS_DATA", "data"))
RESULTS = Path(__file__).parent / "results" / "objectives.json"
# The first of these that has what the objective needs; else any.
VARIANTS = ("xf_bert", "xf_gpt2", "xf_t5", "xf_bart", "xf_electra", "xf_xlnet", "xf_ernie_doc", "xf_hibert")
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Settings with which an objective shows something in a few hundred steps; pairs alone are learned late.
SETTINGS: dict[str, dict[str, Any]] = {
    "nsp": {"mlm": "mlm", "dupe_factor": 3},
    "sop": {"mlm": "mlm"},
    # A word is told before its place. In random order it may be any of those that are left; in a tree two layers find
    # its place (loss .11), but the states that tell the word know nothing of it yet.
    "insertion": {"order": "odd_even"},
    # Of the few that are masked otherwise, 2,000 are held out: too few for a baseline of 1,000 frequencies.
    "entity_replacement": {"mlm_prob": 0.15},
    # Of nine orders three are the text's own, which nothing tells apart; of up to two parts there are three orders.
    "segment_reordering": {"chunks": 2},
    # A third of the rows have a label otherwise, which the model then knows by heart.
    "unilm": {"mode_probs": (0.6, 0.2, 0.1, 0.1), "dupe_factor": 4},
}
# Other rows: a cut is easier to see in fewer tokens.
ROWS: dict[str, dict[str, int]] = {
    "segment_reordering": {"block_size": 32, "per_device_train_batch_size": 32},
}
# Steps of those that show nothing in 400 at RATE; they learn at LATE_RATE. (Of twice that, masked LM learns nothing.)
LATE = {
    "cpc_etc": 500,
    "entity_replacement": 500,
    "nsp": 1200,
    "sop": 1200,
    "span_bert": 500,
    "struct_bert": 1200,
}
# Steps of those that show nothing at LATE_RATE either; they learn at RATE.
LONG = {
    "info_word": 1200,
    "insertion": 1600,
    "replaced_token_detection": 3000,
    "segment_reordering": 2400,
    "unilm": 2000,
}
RATE, LATE_RATE = 3e-3, 6e-3
# Tried in this order: positions that are added to the input, and residual paths after the norm, are learned late.
SET_UPS: dict[str, dict[str, str]] = {
    "rotary, pre-LN": {"position": "rotary", "residual": "pre_ln"},
    "pre-LN": {"residual": "pre_ln"},
    "own": {},
}
# Convolutions know neighbors from the first step on, which rotary positions have to learn: after 400 steps masked LM
# is at 4.81 with the first, at 5.57 with the second. For those that need it; UniLM's masks hide tokens from attention
# alone, and take none.
CONVOLUTIONS = {"convolutions, pre-LN": {"block": "cpe", "position": "none", "residual": "pre_ln"}}
CONVOLVED = frozenset({"info_word", "replaced_token_detection"})
CLEAR = 0.98  # of the baseline: a loss that is higher has shown nothing
COLUMNS = [
    "objective",
    "variant",
    "set-up",
    "settings",
    "data",
    "steps",
    "learning rate",
    "loss",
    "trivial baseline",
    "beats the baseline",
    "accuracy",
    "baseline accuracy",
    "also predicted",
    "its loss",
    "its baseline",
    "its accuracy",
    "its baseline accuracy",
    "probe",
    "probe, random weights",
    "fine-tuned",
    "fine-tuned, random weights",
    "majority",
    "processor seconds",
]
LONGEST = 64


def variant_for(objective: str) -> str:
    known = model_types()
    able = [
        name
        for name in (*(name for name in VARIANTS if name in known), *known)
        if objective in objectives_for(config_class(name))
    ]
    if not able:
        raise ValueError(f"no variant has what {objective} needs; leave it out of --only")
    return able[0]


def written(value: Any) -> str:
    """As the command line has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def pretrained(
    name: str, steps: int, folder: str, set_ups: dict[str, dict[str, str]] | None = None, **further: Any
) -> tuple[str, dict[str, Any]]:
    """The set-up that trained, the first of `set_ups` that the variant takes (default: `SET_UPS`, and `CONVOLUTIONS`
    for those in `CONVOLVED`), and the summary of the run. further: options of the command in place of these here."""
    set_ups = set_ups or (CONVOLUTIONS if name in CONVOLVED else SET_UPS)
    spec = build_objective({"type": name, **SETTINGS.get(name, {})})
    variant = variant_for(spec.type)
    data = str(DATA / "multi30k") if spec.rows == "parallel" else "stdlib"
    options: dict[str, Any] = {
        **SHAPE,
        "variant": variant,
        "objective": name,
        "data": data,
        "block_size": LONGEST,
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": LATE_RATE if name in LATE else RATE,
        "warmup_steps": steps // 12,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": max(1, steps // 4),
        "disable_tqdm": "true",
        "overwrite_output_dir": "true",
        "use_cpu": "true",
    }
    options |= ROWS.get(name, {})
    options |= {f"objective.{key}": written(value) for key, value in SETTINGS.get(name, {}).items()}
    options |= further
    for set_up, extra in set_ups.items():
        flags = [part for key, value in {**options, **extra}.items() for part in (f"--{key}", str(value))]
        with contextlib.redirect_stdout(io.StringIO()):
            code = command(["pretrain", *flags])
        if code == 0:
            return set_up, json.loads((Path(folder) / "training_summary.json").read_text())
    raise ValueError(f"{name} does not train {variant}; what is printed above says why")


# ---------------------------------------------------------------------------------------------------------- SST-2


def sentences(split: str, rows: int) -> tuple[list[str], Tensor]:
    """Texts and labels, evenly taken from the file."""
    with open(DATA / "sst2" / f"{split}.tsv", encoding="utf-8", newline="") as file:
        found = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row[1] in ("0", "1")]
    kept = found[:: max(1, len(found) // rows)][:rows]
    return [row[0] for row in kept], torch.tensor([int(row[1]) for row in kept])


def encoded(texts: list[str], tokenizer: Any) -> list[Tensor]:
    return [torch.tensor(ids[:LONGEST]) for ids in tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]]


def states(model: nn.Module, rows: list[Tensor], pad: int) -> Tensor:
    """[B, D]: the mean of the states of real tokens."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        mask[number, : len(row)] = 1
    reader: Any = model.get_encoder() if model.config.is_encoder_decoder else model  # type: ignore[operator]
    hidden = reader(input_ids=ids, attention_mask=mask).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def features(model: nn.Module, rows: list[Tensor], pad: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([states(model, rows[start : start + 64], pad) for start in range(0, len(rows), 64)])


def probe(model: nn.Module, train: tuple, dev: tuple, pad: int) -> float:
    """Accuracy of a logistic regression on frozen states, standardized."""
    (train_rows, labels), (dev_rows, wanted) = train, dev
    known, unseen = features(model, train_rows, pad), features(model, dev_rows, pad)
    mean, deviation = known.mean(0), known.std(0) + 1e-6
    known, unseen = (known - mean) / deviation, (unseen - mean) / deviation
    weight = torch.zeros(known.shape[1], 2, requires_grad=True)
    bias = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(known @ weight + bias, labels) + 1e-2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return ((unseen @ weight + bias).argmax(-1) == wanted).float().mean().item()


def tuned(model: nn.Module, train: tuple, dev: tuple, pad: int, steps: int, seed: int = 0) -> float:
    """Accuracy after `steps` steps of all weights and a linear classifier, 32 sentences each, in an order that the
    seed decides."""
    (rows, labels), (dev_rows, wanted) = train, dev
    torch.manual_seed(seed)
    head = nn.Linear(model.config.hidden_size, 2)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=2e-3, weight_decay=0.01)
    draw = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        chosen = torch.randint(len(rows), (32,), generator=draw).tolist()
        loss = F.cross_entropy(head(states(model, [rows[index] for index in chosen], pad)), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return (head(features(model, dev_rows, pad)).argmax(-1) == wanted).float().mean().item()


@dataclass(frozen=True)
class Worth:
    """What states are worth for SST-2: accuracies of the probe and after fine-tuning."""

    probe: float
    tuned: float


class Untrained:
    """The same of models from random weights, found once for each configuration and encoded text."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, bytes], Worth] = {}

    def worth(self, kind: Any, config: Any, train: tuple, find: Callable[[Any], Worth]) -> Worth:
        """Of `kind(config)` with seed 0."""
        fields = {key: value for key, value in config.to_dict().items() if key not in ("architectures", "pretraining")}
        text = hashlib.sha256(torch.cat(train[0]).numpy().tobytes()).digest()
        key = json.dumps(fields, sort_keys=True, default=str), text
        if key not in self.known:
            torch.manual_seed(0)
            self.known[key] = find(kind(config))
        return self.known[key]


def learned_beside(summary: dict[str, Any]) -> dict[str, Any]:
    """What a model predicts besides tokens: its name, its figures and their baselines; None where there is nothing."""
    kind = next((kind for kind in FURTHER_LABELS if f"eval_{kind}_loss" in summary), None)
    figures = {
        f"its {name}": summary.get(f"eval_{start}{kind}_{end}")
        for name, start, end in (
            ("loss", "", "loss"),
            ("baseline", "baseline_", "loss"),
            ("accuracy", "", "accuracy"),
            ("baseline accuracy", "baseline_", "accuracy"),
        )
    }
    return {"also predicted": kind and kind.replace("_", " "), **figures}


def clears(row: dict[str, Any]) -> bool | None:
    """Whether all that is predicted was learned beyond its baseline; None where a loss or a baseline is not known."""
    pairs = [(row["loss"], row["trivial baseline"])]
    if row["also predicted"] is not None:
        pairs.append((row["its loss"], row["its baseline"]))
    if any(value is None for pair in pairs for value in pair):
        return None
    return all(loss < CLEAR * floor for loss, floor in pairs)


def measured(name: str, steps: int, tuning_steps: int, rows: int, untrained: Untrained) -> dict[str, Any]:
    from transformers import AutoTokenizer

    started = time.process_time()
    chosen = {**SETTINGS.get(name, {}), **ROWS.get(name, {})}
    with tempfile.TemporaryDirectory() as folder:
        set_up, summary = pretrained(name, steps, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        kind: Any = family(summary["variant"])["Model"]

        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        train, dev = (
            (encoded(texts, tokenizer), labels)
            for texts, labels in (sentences("train", rows), sentences("dev", min(rows, 871)))
        )

        def worth(model: Any) -> Worth:
            return Worth(probe(model, train, dev, pad), tuned(model, train, dev, pad, tuning_steps))

        model = kind.from_pretrained(folder)
        random = untrained.worth(kind, model.config, train, worth)
        learned = worth(model)
        row = {
            "objective": name,
            "variant": summary["variant"],
            "set-up": set_up,
            "data": Path(summary["data"]["data"][0]).name,
            "steps": summary["steps"],
            "learning rate": LATE_RATE if name in LATE else RATE,
            "settings": ", ".join(f"{key}={written(value)}" for key, value in chosen.items()) or None,
            "loss": summary.get("eval_loss"),
            "trivial baseline": summary.get("eval_baseline_loss"),
            "accuracy": summary.get("eval_accuracy"),
            "baseline accuracy": summary.get("eval_baseline_accuracy"),
            **learned_beside(summary),
            "probe": learned.probe,
            "probe, random weights": random.probe,
            "fine-tuned": learned.tuned,
            "fine-tuned, random weights": random.tuned,
            "majority": max(dev[1].float().mean().item(), 1 - dev[1].float().mean().item()),
        }
    row["beats the baseline"] = clears(row)
    row["processor seconds"] = round(time.process_time() - started)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def write(rows: list[dict[str, Any]], tuning_steps: int, sentences_read: int) -> None:
    note = (
        f"Width 64, two layers, batches of 16 rows of {LONGEST} tokens unless `settings` says otherwise. Losses in"
        " nats per target, held out. `also predicted`: what an objective predicts besides them, whose loss, accuracy"
        " and baselines are its own. `beats the baseline`: whether every loss is below what the frequencies of its"
        f" targets reach by more than {1 - CLEAR:.0%}; a row where it is not says nothing about its objective."
        " `set-up`: rotary positions and pre-LN where the variant takes them, else what it takes; where"
        " that shows nothing, convolutions (a depthwise one over three tokens behind the first layer, in place of"
        f" positions). Probe (on frozen states) and fine-tuning ({tuning_steps} steps) learn from {sentences_read:,}"
        " sentences of SST-2; their accuracies are of its validation split, 871 sentences, so that differences below"
        " 0.03 are chance."
    )
    write_results("objectives", rows, COLUMNS, "What an encoder learns from each objective", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of objectives, with commas between; default: all")
    parser.add_argument("--steps", type=int, help="of pretraining; default: 400, or those in `LATE` or `LONG`")
    parser.add_argument("--tuning_steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=6918, help="sentences of SST-2 to learn from")
    parser.add_argument("--print", action="store_true", help="print rows and write nothing")
    arguments = parser.parse_args()
    names = (
        arguments.only.split(",")
        if arguments.only
        else [name for name, kind in OBJECTIVES.items() if kind.rows != "images"]
    )
    names = [OBJECTIVES[name].type for name in names]
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    measured_before = {old["objective"] for old in before}
    untrained = Untrained()
    for name in names:
        if not arguments.only and not arguments.print and name in measured_before:
            continue
        steps = arguments.steps or {**LATE, **LONG}.get(name, 400)
        row = measured(name, steps, arguments.tuning_steps, arguments.rows, untrained)
        print(json.dumps(row), flush=True)
        if arguments.print:
            continue
        before = [old for old in before if old["objective"] != name] + [row]
        order = list(OBJECTIVES)
        before.sort(key=lambda old: order.index(old["objective"]) if old["objective"] in order else len(order))
        write(before, arguments.tuning_steps, arguments.rows)


if __name__ == "__main__":
    main()
