"""What does transfer bring? Ways to fine-tune one pretrained encoder on SST-2 and WNUT-17, at equal steps.

python benchmarks/transfer.py --data DIR --model FOLDER [--tasks sst2,wnut17] [--methods plain,layers,...] [--seeds 3]
    [--steps 1200] [--learning_rate 3e-4] [--class_balance 0.5] [-- OPTION ...]

DIR holds `sst2/{train,dev}.tsv` (sentence, label, no header) and `wnut17/{train,dev}.conll`, and perhaps `test`
files; FOLDER is a saved encoder, such as `hf-xformers pretrain` leaves. Every method runs through the command
`hf-xformers finetune`, whose further options follow `--`, takes its checkpoint by the validation rows, and is measured
on the test rows; without files `test` these are those of `dev`, and a tenth of the training rows validates. A fusion
reads one Pfeiffer adapter for each task, of the first seed. Rows replace those of the same task, model and
method in `results/transfer.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import finetuning
from measure import write_results

from hf_xformers import cli

RESULTS = Path(__file__).parent / "results"
COLUMNS = ["task", "model", "method", "trained", "steps", "seeds", "seconds", "metric", "test", "spread", "floor"]
KINDS = {"sst2": "classification", "wnut17": "tagging"}
METRICS = {"sst2": "accuracy", "wnut17": "f1"}
SUFFIX = {"sst2": "tsv", "wnut17": "conll"}
OTHER = {"sst2": "wnut17", "wnut17": "sst2"}
METHODS: dict[str, list[str]] = {
    "plain": [],
    "layer rates": ["--layer_decay", "1.3"],
    "ulmfit": ["--layer_decay", "1.3", "--unfreeze_every", "1", "--slanted_triangular"],
    "self-ensemble": ["--self_ensemble", "se"],
    "sda": ["--self_ensemble", "sda"],
    "sdv": ["--self_ensemble", "sdv", "--teacher_window", "3"],
    "intermediate": [],
    "several tasks": [],
    "houlsby": ["--peft", "houlsby"],
    "pfeiffer": ["--peft", "pfeiffer"],
    "fusion": ["--peft", "fusion"],
    "k-adapter": ["--peft", "k_adapter"],
}


def data_of(folder: Path, task: str, name: str = "") -> list[str]:
    """Options of a task's rows; name: what stands before each value, of several tasks."""
    train, dev, test = (folder / task / f"{split}.{SUFFIX[task]}" for split in ("train", "dev", "test"))
    columns = ["--column_names", f"{name}text", f"{name}label"] if task == "sst2" else []
    if test.is_file():
        return ["--data", *(f"{name}{file}" for file in (train, dev, test)), *columns]
    return ["--data", f"{name}{train}", "--test_data", f"{name}{dev}", *columns]


def run(*argv: Any) -> None:
    code = cli.main([str(entry) for entry in argv])
    if code:
        raise SystemExit(code)


def measure(task: str, method: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of a run of a method, of its task alone."""
    shared: list[Any] = ["--model", args.model, "--max_steps", args.steps, "--seed", seed, "--max_length", 96]
    shared += ["--eval_strategy", "steps", "--save_strategy", "steps", "--save_total_limit", 2]
    shared += ["--eval_steps", args.steps // 6, "--save_steps", args.steps // 6, "--disable_tqdm", "true"]
    # Few parameters learn at a higher rate: the command's own factor.
    rate = args.learning_rate * (10 if "--peft" in METHODS[method] else 1)
    shared += ["--learning_rate", rate, *args.extra]
    own = ["--task", KINDS[task], *data_of(args.data, task)]
    own += ["--class_balance", args.class_balance] if task == "wnut17" and args.class_balance else []
    output = folder / f"{task}-{method.replace(' ', '-')}-{seed}"
    other = OTHER[task]
    if method == "several tasks":  # which have no class weights
        named = []
        for name in (task, other):
            named += ["--task", f"{name}={KINDS[name]}", *data_of(args.data, name, f"{name}=")]
        run("finetune", *shared, *named, "--output_dir", output)
        whole = json.loads((output / "training_summary.json").read_text())
        return {**whole, **whole["tasks"][task]}
    if method == "intermediate":
        rows = args.data / other / f"train.{SUFFIX[other]}"
        own += ["--intermediate_task", KINDS[other], "--intermediate_data", rows]
        own += ["--intermediate_column_names", "text", "label"] if other == "sst2" else []
    if method == "fusion":
        adapters = [trained_adapter(name, folder, args) for name in KINDS]
        own += ["--peft.adapters", ",".join(map(str, adapters))]
    run("finetune", *shared, *own, *METHODS[method], "--output_dir", output)
    return json.loads((output / "training_summary.json").read_text())


def trained_adapter(task: str, folder: Path, args: argparse.Namespace) -> Path:
    place = folder / f"{task}-pfeiffer-0"
    if not (place / "bottleneck_config.json").is_file():
        measure(task, "pfeiffer", 0, folder, args)
    return place


def row_of(task: str, method: str, summaries: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    metric = METRICS[task]
    scores = [100 * summary[f"test_{metric}"] for summary in summaries]
    floor = finetuning.TASKS[task](args.data)["baseline"][1]
    return {
        "task": task,
        "model": Path(args.model).name,
        "method": method,
        "trained": summaries[0]["trained_parameters"],
        "steps": summaries[0]["steps"],
        "seeds": len(scores),
        "seconds": round(statistics.mean(summary["seconds"] for summary in summaries), 1),
        "metric": metric,
        "test": statistics.mean(scores),
        "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "floor": 100 * floor,
    }


def write(row: dict[str, Any]) -> None:
    """Replaces the row of the same task, model and method, and the table made of all."""
    path = RESULTS / "transfer.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    order = list(METHODS)
    rows = sorted(
        [*(other for other in old if key(other) != key(row)), row],
        key=lambda entry: (entry["task"], entry["model"], order.index(entry["method"])),
    )
    note = (
        "In percent, means over seeds with their standard deviation (`spread`), on the test rows; the checkpoint is"
        " taken by the validation rows. Methods of one task have equal steps; of `several tasks` these are those of"
        " both together, and `intermediate` and `fusion` have as many before, on the other task or for the adapters."
        " `several tasks` has no class weights, which the others have on WNUT-17. `floor`: the majority class; the tag"
        " that the training rows give a word most often."
    )
    write_results("transfer", rows, COLUMNS, "Transfer: ways to fine-tune one encoder", note)


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["task"], row["model"], row["method"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2 and wnut17")
    parser.add_argument("--model", required=True, help="folder of a pretrained encoder, or a Hub id")
    parser.add_argument("--tasks", default=",".join(KINDS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument(
        "--class_balance", type=float, default=0.5, help="of WNUT-17, where nearly all words are outside"
    )
    parser.add_argument("extra", nargs="*", help="after --: further options of hf-xformers finetune")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        for task in args.tasks.split(","):
            for method in args.methods.split(","):
                if method not in METHODS:
                    raise SystemExit(f"there is no method {method!r}; choose from {', '.join(METHODS)}")
                found = [measure(task, method, seed, Path(folder), args) for seed in range(args.seeds)]
                row = row_of(task, method, found, args)
                write(row)
                print(json.dumps(row))


if __name__ == "__main__":
    main()
