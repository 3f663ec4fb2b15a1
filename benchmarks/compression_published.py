"""What ways of compression keep and cost of all-MiniLM-L6-v2, on SST-2 and WNUT-17, over three seeds.

    bash scripts/real_models.sh
    HF_HUB_OFFLINE=1 python benchmarks/compression_published.py --data DIR --work DIR [--tasks sst2,wnut17] [--time]

Data, test split and ways are those of `benchmarks/compression.py`; the model is a published one, fine-tuned anew for
each seed. SST-2 takes a quarter of an hour of one core for a seed, WNUT-17 half an hour. What is in --work is not
trained or scored again. `--time` then takes the time of a batch, of the first seed's models, in five minutes of an
idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from compression import TRAIN, Task, run
from measure import write_results

from hf_xformers.compression.report import Measuring, compare, measure

WAYS: dict[str, list[list[Any]]] = {
    "40 % of heads": [["prune", "--method", "heads", "--share", 0.4]],
    "half of the layers + training": [["prune", "--method", "layers", "--keep_layers", 3], [TRAIN]],
    "distilbert, 3 layers": [["distill", "--method", "distilbert", "--student.num_hidden_layers", 3]],
    "theseus, 3 layers": [["distill", "--method", "theseus", "--student.num_hidden_layers", 3]],
    "int8 weights": [["quantize", "--weights", "int8"]],
}
TUNED = "fine-tuned"
TRAINING = {"sst2": (1, 5e-5), "wnut17": (3, 1e-4)}  # epochs and learning rate, of a way as of the fine-tuning
COLUMNS = ["task", "method", "test", "spread", "baseline", "size", "time", "metric", "parameters", "seeds"]
NOTE = (
    "all-MiniLM-L6-v2 (BERT, 6 layers of width 384), fine-tuned (SST-2: one epoch, WNUT-17: three), then made smaller."
    " `test`: accuracy of SST-2 (872 sentences) or F1 of entities of WNUT-17 (`dev`), in percent, a mean over three"
    " seeds, of which nothing was chosen; `spread`: highest less lowest. `baseline`: the"
    " majority class; the most frequent tag that the training rows give a word. `size` on disk and `time` of a batch"
    " (16 rows of 64 tokens, no padding) by those of the fine-tuned model. `parameters` are those that are not zero."
    " Ways that train take as many epochs as the fine-tuning."
)


class Published(Task):
    """A task on which a published encoder is fine-tuned."""

    def pretrained(self) -> Path:
        folder = self.args.work / "converted"
        if not (folder / "config.json").exists():
            run("convert", "--from", self.args.model, "--to", folder)
        return folder

    def training(self) -> list[Any]:
        return [*super().training(), "--seed", self.args.seed]


def scored(folder: Path, task: Published) -> dict[str, Any]:
    """Quality and size of a model, kept next to it."""
    path = folder.parent / f"{folder.name}.json"
    if not path.exists():
        row = measure(folder, Measuring(eval_data=[str(task.files[2])], time_batches=0))
        path.write_text(json.dumps({"test": 100 * row.quality, "parameters": row.nonzero, "bytes": row.bytes}))
        print(task.name, task.args.seed, folder.name, path.read_text(), flush=True)
    return json.loads(path.read_text())


def timed(folder: Path, source: Path, task: Published) -> float:
    """Of a batch, by that of the source."""
    measuring = Measuring(eval_data=[str(task.files[2])], max_eval_rows=16, time_length=64, time_batches=15)
    measuring.use_cpu = True
    before, after = compare(source, folder, measuring)
    return after.seconds / before.seconds


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    epochs, rate = TRAINING[name]
    for seed in args.seeds:
        own = argparse.Namespace(**vars(args), seed=seed, epochs=epochs, learning_rate=rate)
        task = Published(name, own, args.work / f"seed-{seed}")
        source = task.tuned(task.pretrained())
        folders = {TUNED: source} | {way: task.compressed(way, steps, source) for way, steps in WAYS.items()}
        known = args.work / f"{name}-times.json"
        times = json.loads(known.read_text()) if known.exists() else {}
        if args.time and seed == args.seeds[0]:
            times = {way: 1.0 if way == TUNED else timed(folder, source, task) for way, folder in folders.items()}
            known.write_text(json.dumps(times))
        for way, folder in folders.items():
            found.setdefault(way, []).append(scored(folder, task))
    rows = []
    for way, scores in found.items():
        tests = [score["test"] for score in scores]
        rows.append({"task": name, "method": way, "metric": task.metric, "seeds": len(tests)})
        spread = max(tests) - min(tests) if len(tests) > 1 else None
        rows[-1] |= {"test": statistics.mean(tests), "spread": spread, "baseline": task.floor()}
        rows[-1] |= {"size": scores[0]["bytes"] / found[TUNED][0]["bytes"], "time": times.get(way)}
        rows[-1] |= {"parameters": scores[0]["parameters"]}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2 and wnut17")
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--model", type=Path, default=Path("models/minilm"))
    parser.add_argument("--tasks", default="sst2,wnut17")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    rows = [row for name in args.tasks.split(",") for row in rows_of(name, args)]
    if not args.no_write:
        write_results("compression_published", rows, COLUMNS, "Compression of MiniLM", NOTE)


if __name__ == "__main__":
    main()
