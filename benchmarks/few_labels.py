"""What is pretraining worth where labels are few?

HF_XFORMERS_DATA=... HF_HUB_OFFLINE=1 python benchmarks/few_labels.py [--objectives clm,mlm] [--steps 2000]
    [--labels 100,500,2000] [--draws 5] [--seeds 1] [--print]

`benchmarks/objectives.py` pretrains on other text than the task's and then has thousands of labels, where a small
model gains nothing. Here the text is the task's own: an objective trains a model (width 64, two layers) from nothing
on the sentences of SST-2's training part without their labels; a few of these sentences, drawn at random, then have
labels. Each draw gives a linear probe of frozen states and a fine-tuning of all weights, both measured on the
validation part, which nothing else reads, and both compared with the same from random weights, which are drawn anew
each time: same tokenizer, sentences, order and steps. With several seeds an objective trains as many models, each of
which serves all draws. SST-2 is read from $HF_XFORMERS_DATA. Rows of other objectives, steps or numbers of labels
stay. A model takes a few minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import write_results
from objectives import CLEAR, CONVOLUTIONS, LATE_RATE, RATE, encoded, pretrained, probe, sentences, tuned
from torch import nn

from hf_xformers.objectives import OBJECTIVES
from hf_xformers.variants import family

RESULTS = Path(__file__).parent / "results" / "few_labels.json"
VOCABULARY = 2000
COLUMNS = [
    "objective",
    "variant",
    "set-up",
    "steps",
    "loss",
    "trivial baseline",
    "labels",
    "seeds",
    "draws",
    "probe",
    "probe, random weights",
    "probe better in",
    "fine-tuned",
    "fine-tuned, random weights",
    "fine-tuned better in",
    "spread of draws",
    "majority",
    "processor seconds",
]
KEY = ("objective", "steps", "labels", "seeds", "draws")


@dataclass(frozen=True)
class Accuracies:
    """Of one draw of labeled sentences."""

    probe: float
    tuned: float


class Task:
    """SST-2 with few labels, as one tokenizer reads it. labels: the numbers of labeled sentences."""

    def __init__(self, tokenizer: Any, tuning_steps: int) -> None:
        self.pad = tokenizer.pad_token_id
        self.steps = tuning_steps
        texts, self.labels = sentences("train", 10_000)
        self.rows = encoded(texts, tokenizer)
        texts, wanted = sentences("dev", 10_000)
        self.dev = encoded(texts, tokenizer), wanted

    @property
    def majority(self) -> float:
        share = self.dev[1].float().mean().item()
        return max(share, 1 - share)

    def worth(self, model: nn.Module, labels: int, draw: int) -> Accuracies:
        """Of a model, which is changed, with so many labeled sentences."""
        chosen = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(draw))[:labels]
        train = [self.rows[index] for index in chosen.tolist()], self.labels[chosen]
        return Accuracies(
            probe(model, train, self.dev, self.pad), tuned(model, train, self.dev, self.pad, self.steps, seed=draw)
        )


@dataclass
class Trained:
    """What came of one seed's pretraining, and by number of labels what each draw then gave, of it and of random
    weights."""

    set_up: str
    summary: dict[str, Any]
    majority: float
    pairs: dict[int, list[tuple[Accuracies, Accuracies]]]


def trained(
    objective: str, steps: int, counts: list[int], draws: int, tuning_steps: int, shared: Path, seed: int
) -> Trained:
    """shared: folder of the tokenizer, which the first run makes."""
    from transformers import AutoTokenizer

    # What reads both sides learns in so few steps with convolutions, and at the lower rate.
    encoder = OBJECTIVES[objective].shape == "encoder"
    with tempfile.TemporaryDirectory() as folder:
        text, run = Path(folder) / "sentences.txt", Path(folder) / "run"
        text.write_text("\n".join(sentences("train", 10_000)[0]), encoding="utf-8")
        options = {"data": str(text), "vocab_size": VOCABULARY, "sample_by": "line", "seed": seed}
        options["learning_rate"] = RATE if encoder else LATE_RATE
        if shared.exists():
            options["tokenizer"] = str(shared)
        set_up, summary = pretrained(objective, steps, str(run), CONVOLUTIONS if encoder else None, **options)
        tokenizer = AutoTokenizer.from_pretrained(run)
        tokenizer.save_pretrained(shared)
        kind: Any = family(summary["variant"])["Model"]
        task = Task(tokenizer, tuning_steps)
        pairs: dict[int, list[tuple[Accuracies, Accuracies]]] = {labels: [] for labels in counts}
        for labels in counts:
            for draw in range(draws):
                model = kind.from_pretrained(run)
                learned = task.worth(model, labels, draw)
                torch.manual_seed(draws * seed + draw)
                pairs[labels].append((learned, task.worth(kind(model.config), labels, draw)))
    return Trained(set_up, summary, task.majority, pairs)


def measured(
    objective: str, steps: int, counts: list[int], seeds: int, draws: int, tuning_steps: int, shared: Path
) -> list[dict]:
    """A row for each number of labels."""
    started = time.process_time()
    runs = [trained(objective, steps, counts, draws, tuning_steps, shared, seed) for seed in range(seeds)]
    rows = []
    for labels in counts:
        pairs = [pair for run in runs for pair in run.pairs[labels]]
        found: dict[str, Any] = {}
        for name, column in (("probe", "probe"), ("tuned", "fine-tuned")):
            values = [(getattr(one, name), getattr(other, name)) for one, other in pairs]
            found[column] = 100 * statistics.mean(one for one, _ in values)
            found[f"{column}, random weights"] = 100 * statistics.mean(other for _, other in values)
            found[f"{column} better in"] = sum(one > other for one, other in values)
        row = {
            "objective": objective,
            "variant": runs[0].summary["variant"],
            "set-up": runs[0].set_up,
            "steps": runs[0].summary["steps"],
            "loss": statistics.mean(run.summary["eval_loss"] for run in runs),
            "trivial baseline": statistics.mean(run.summary["eval_baseline_loss"] for run in runs),
            "labels": labels,
            "seeds": seeds,
            "draws": draws,
            **found,
            "spread of draws": 100 * statistics.stdev(other.tuned for _, other in pairs) if len(pairs) > 1 else None,
            "majority": 100 * runs[0].majority,
            "processor seconds": round(time.process_time() - started),
        }
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def write(rows: list[dict[str, Any]], tuning_steps: int) -> None:
    note = (
        "Width 64, two layers. An objective trains from nothing on the sentences of SST-2's training part without"
        " labels; then some of these sentences, drawn at random, have labels, from which a probe of frozen states and"
        f" all weights ({tuning_steps} steps of 32 sentences) learn. Accuracies in percent on the validation part, 872"
        " sentences, means over seeds and draws, compared with those of random weights. These are drawn anew each"
        " time, where the model of a pretraining seed serves all draws. `better in`: in how many of seeds times draws"
        " the pretrained model was the better one; `spread of draws`: standard deviation of the fine-tuned random"
        " weights. Losses in nats per target, held out. A run that learned no more than token frequencies has no row."
    )
    write_results("few_labels", rows, COLUMNS, "What pretraining is worth where labels are few", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", default="clm,mlm")
    parser.add_argument("--steps", type=int, default=2000, help="of pretraining, 16 rows of 64 tokens each")
    parser.add_argument("--labels", default="100,500,2000", help="numbers of labeled sentences")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1, help="of pretraining, each with all draws")
    parser.add_argument("--tuning_steps", type=int, default=100)
    parser.add_argument("--print", action="store_true", help="print rows and write nothing")
    arguments = parser.parse_args()
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    counts = [int(count) for count in arguments.labels.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for objective in arguments.objectives.split(","):
            rows = measured(
                objective,
                arguments.steps,
                counts,
                arguments.seeds,
                arguments.draws,
                arguments.tuning_steps,
                Path(folder) / "tokenizer",
            )
            rows = [row for row in rows if row["loss"] < CLEAR * row["trivial baseline"]]
            if arguments.print or not rows:
                continue
            anew = {tuple(row[key] for key in KEY) for row in rows}
            before = [old for old in before if tuple(old[key] for key in KEY) not in anew] + rows
            before.sort(key=lambda row: tuple(row[key] for key in KEY))
            write(before, arguments.tuning_steps)


if __name__ == "__main__":
    main()
