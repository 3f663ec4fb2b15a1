"""What does transfer bring? Ways to fine-tune one pretrained encoder on SST-2 and WNUT-17, at equal steps.

python benchmarks/transfer.py --data DIR --model FOLDER [--pretrain_steps 3000] [--tasks sst2,wnut17]
    [--methods "plain,layer rates,..."] [--seeds 3] [--steps 300] [--learning_rate 1e-3] [--class_balance 0.5]
    [--work FOLDER] [-- OPTION ...]

DIR holds `sst2/{train,dev}.tsv` (sentence, label, no header) and `wnut17/{train,dev}.conll`, and perhaps `test`
files; FOLDER is a saved encoder, such as `hf-xformers pretrain` leaves, and is pretrained first where it is none yet.
Every method runs through the command `hf-xformers finetune`, whose further options follow `--`, takes its checkpoint
by the validation rows, and is measured on the test rows; without files `test` these are those of `dev`, and a tenth of
the training rows validates. A fusion reads one Pfeiffer adapter for each task, of the first seed. Rows replace those
of the same task, model and method in `results/transfer.json`; with --work, what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import finetuning
from measure import write_results
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, set_seed

from hf_xformers import cli

RESULTS = Path(__file__).parent / "results"
COLUMNS = [
    *("task", "model", "method", "trained", "rate", "steps", "seeds", "processor seconds"),
    *("metric", "test", "spread", "baseline"),
]
KINDS = {"sst2": "classification", "wnut17": "tagging"}
BATCH = 16
METRICS = {"sst2": "accuracy", "wnut17": "f1"}
SUFFIX = {"sst2": "tsv", "wnut17": "conll"}
# What learns masked tokens in a few thousand steps of a small width: learned positions take far longer.
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "residual": "pre_ln",
    "block": "cpe",
    "position": "none",
    # Masked tokens teach the first token nothing about the whole, so that classifiers read the mean of all.
    "add_pooler": "false",
    "classifier_pooling": "mean",
    "unpad_inputs": "true",
}
OTHER = {"sst2": "wnut17", "wnut17": "sst2"}
METHODS: dict[str, list[str]] = {
    "no pretraining": [],
    "head alone": ["--unfreeze_every", "1e6"],
    "plain": [],
    "layer rates": ["--layer_decay", "1.3"],
    "ulmfit": ["--layer_decay", "1.3", "--slanted_triangular"],  # and a layer more at every step of `joining`
    "self-ensemble": ["--self_ensemble", "se"],
    "sda": ["--self_ensemble", "sda"],
    "sdv": ["--self_ensemble", "sdv", "--teacher_window", "3"],
    "intermediate": [],
    "several tasks": [],
    "houlsby": ["--peft", "houlsby"],
    "pfeiffer": ["--peft", "pfeiffer"],
    "fusion": ["--peft", "fusion"],
    "k-adapter": ["--peft", "k_adapter", "--unpad_inputs", "false"],  # it reads rows of one length
}
ABOUT = {
    "no pretraining": "plain, from weights drawn anew",
    "head alone": "over the frozen encoder; what an adapter brings is what it adds to that",
    "ulmfit": "a layer more joins at equal distances, the last one after half of the steps",
    "self-ensemble": "the mean of the last five steps' weights, which hardly differ as the rate ends at zero",
    "intermediate": "after as many steps on the other task",
    "several tasks": "its steps are those of both together",
    "pfeiffer": "as all adapters, over a frozen encoder, which knows little of what a sentence means",
    "k-adapter": "reads rows with their padding, which the others take out",
    "fusion": "of the two tasks' Pfeiffer adapters, which had as many steps before",
}
FEW = ("head alone", "houlsby", "pfeiffer")  # parameters, which learn at a higher rate: the command's own factor


def tested(folder: Path, task: str) -> bool:
    """Whether the task has test rows next to `dev`."""
    return (folder / task / f"test.{SUFFIX[task]}").is_file()


def data_of(folder: Path, task: str, name: str = "") -> list[str]:
    """Options of a task's rows; name: what stands before each value, of several tasks."""
    train, dev, test = (folder / task / f"{split}.{SUFFIX[task]}" for split in ("train", "dev", "test"))
    columns = ["--column_names", f"{name}text", f"{name}label"] if task == "sst2" else []
    if tested(folder, task):
        return ["--data", *(f"{name}{file}" for file in (train, dev, test)), *columns]
    return ["--data", f"{name}{train}", "--test_data", f"{name}{dev}", *columns]


def run(*argv: Any) -> None:
    code = cli.main([str(entry) for entry in argv])
    if code:
        raise SystemExit(code)


def pretrain(args: argparse.Namespace) -> None:
    """Makes the encoder where its folder has none, from the texts of both tasks' training rows and of WikiText-2."""
    folder = Path(args.model)
    if (folder / "config.json").is_file() or not args.pretrain_steps:
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for name in KINDS for text in finetuning.TASKS[name](args.data)["texts"]]
    texts += (args.data / "wikitext2" / "train.txt").read_text(encoding="utf-8").splitlines()
    file = folder / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in texts if text.strip()), encoding="utf-8")
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
    run(
        *("pretrain", "--variant", "bert", "--objective", "mlm", "--data", file, "--output_dir", folder, *shape),
        *("--max_steps", args.pretrain_steps, "--block_size", 64, "--learning_rate", 2e-3, "--disable_tqdm", "true"),
        *("--eval_strategy", "no", "--save_steps", 500, "--save_total_limit", 1),
        *("--resume_from_checkpoint", "true" if any(folder.glob("checkpoint-*")) else "false"),
    )


def rate_of(method: str, args: argparse.Namespace) -> float:
    return args.learning_rate * (10 if method in FEW else 1)


def joining(task: str, args: argparse.Namespace) -> list[Any]:
    """ULMFiT's option that lets all layers have joined after a half of the steps, however few epochs these are."""
    rows = len(finetuning.TASKS[task](args.data)["texts"]) * (1.0 if tested(args.data, task) else 0.9)
    layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
    epochs = args.steps / (rows / BATCH)
    return ["--unfreeze_every", round(epochs / 2 / (layers + 1), 3)]


def measure(task: str, method: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of a run of a method, of its task alone; that of an earlier run with the same options, if any."""
    both = method == "several tasks"  # of which one run serves both
    output = folder / "-".join([*([] if both else [task]), *method.split(), str(seed)])
    options = {**vars(args), **dict.fromkeys(("tasks", "methods", "seeds", "work", "pretrain_steps"))}
    known = {"options": {name: str(value) for name, value in options.items() if value is not None}}
    record = output / "transfer.json"
    found = json.loads(record.read_text()) if record.is_file() else {}
    if found.get("options") != known["options"]:
        before = time.process_time()
        train(task, method, seed, output, args)
        found = {**known, **json.loads((output / "training_summary.json").read_text())}
        found["processor seconds"] = time.process_time() - before
        record.write_text(json.dumps(found, indent=1))
    return {**found, **found["tasks"][task]} if both else found


def train(task: str, method: str, seed: int, output: Path, args: argparse.Namespace) -> None:
    model = untrained(output.parent, seed, args) if method == "no pretraining" else args.model
    shared: list[Any] = ["--model", model, "--max_steps", args.steps, "--seed", seed, "--max_length", 96]
    shared += ["--eval_strategy", "steps", "--save_strategy", "steps", "--save_total_limit", 2]
    shared += ["--eval_steps", args.steps // 3, "--save_steps", args.steps // 3, "--disable_tqdm", "true"]
    shared += ["--learning_rate", rate_of(method, args), "--per_device_train_batch_size", BATCH]
    shared += ["--per_device_eval_batch_size", 32, "--attention_probs_dropout_prob", 0]
    shared += ["--overwrite_output_dir", *args.extra]
    own = ["--task", KINDS[task], *data_of(args.data, task)]
    own += ["--class_balance", args.class_balance] if task == "wnut17" else []
    other = OTHER[task]
    if method == "several tasks":
        named: list[Any] = ["--class_balance", f"wnut17={args.class_balance}"]
        for name in KINDS:
            named += ["--task", f"{name}={KINDS[name]}", *data_of(args.data, name, f"{name}=")]
        run("finetune", *shared, *named, "--output_dir", output)
        return
    if method == "intermediate":
        rows = args.data / other / f"train.{SUFFIX[other]}"
        own += ["--intermediate_task", KINDS[other], "--intermediate_data", rows]
        own += ["--intermediate_column_names", "text", "label"] if other == "sst2" else []
    if method == "ulmfit":
        own += joining(task, args)
    if method == "fusion":
        adapters = [trained_adapter(name, output.parent, args) for name in KINDS]
        own += ["--peft.adapters", ",".join(map(str, adapters))]
    run("finetune", *shared, *own, *METHODS[method], "--output_dir", output)


def untrained(folder: Path, seed: int, args: argparse.Namespace) -> Path:
    """The encoder with weights that were drawn anew, and its tokenizer."""
    place = folder / f"untrained-{seed}"
    set_seed(seed)
    AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(args.model)).save_pretrained(place)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(place)
    return place


def trained_adapter(task: str, folder: Path, args: argparse.Namespace) -> Path:
    measure(task, "pfeiffer", 0, folder, args)
    return folder / f"{task}-pfeiffer-0"


def encoder(folder: str) -> str:
    """A sentence on the encoder's pretraining, where its folder tells of it."""
    record = Path(folder) / "training_summary.json"
    about = json.loads(record.read_text()) if record.is_file() else {}
    if "eval_baseline_loss" not in about:
        return ""
    return (
        f" `{Path(folder).name}`: {about['parameters']:,} parameters, pretrained for {about['steps']:,} steps, at a"
        f" held-out loss of {about['eval_loss']:.2f} ({about['eval_baseline_loss']:.2f} by token frequencies)."
    )


def row_of(task: str, method: str, summaries: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    metric = METRICS[task]
    scores = [100 * summary[f"test_{metric}"] for summary in summaries]
    floor = finetuning.TASKS[task](args.data)["baseline"][1]
    return {
        "task": task,
        "model": Path(args.model).name,
        "method": method,
        "trained": summaries[0]["trained_parameters"],
        "rate": rate_of(method, args),
        "steps": summaries[0]["steps"],
        "seeds": len(scores),
        "processor seconds": round(statistics.mean(summary["processor seconds"] for summary in summaries), 1),
        "metric": metric,
        "test": statistics.mean(scores),
        "spread": statistics.stdev(scores) if len(scores) > 1 else None,
        "baseline": 100 * floor,
    }


def write(row: dict[str, Any], args: argparse.Namespace) -> None:
    """Replaces the row of the same task, model and method, and the table made of all."""
    path = RESULTS / "transfer.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    order = list(METHODS)
    rows = sorted(
        [*(other for other in old if key(other) != key(row)), row],
        key=lambda entry: (entry["task"], entry["model"], order.index(entry["method"])),
    )
    there = {entry["method"] for entry in rows}
    note = (
        "In percent, means over seeds with their standard deviation (`spread`), on the test rows; the checkpoint is"
        " taken by the validation rows. Methods of one task have equal steps. "
        + "".join(f"`{name}`: {text}. " for name, text in ABOUT.items() if name in there)
        + "WNUT-17 has class weights, as the command learns to tag nothing without. `rate`: peak learning rate, ten"
        " times higher for few parameters. Rates and the pooling were settled in pilots whose test figures were"
        " seen, so that small differences say nothing. `baseline`: the majority class; the tag that the training rows"
        f" give a word most often.{encoder(args.model)}"
    )
    write_results("transfer", rows, COLUMNS, "Transfer: ways to fine-tune one encoder", note)


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["task"], row["model"], row["method"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2 and wnut17")
    parser.add_argument("--model", required=True, help="folder of a pretrained encoder, or a Hub id")
    parser.add_argument("--pretrain_steps", type=int, default=0, help="of the encoder, where FOLDER has none yet")
    parser.add_argument("--tasks", default=",".join(KINDS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument(
        "--class_balance", type=float, default=0.5, help="of WNUT-17, where nearly all words are outside"
    )
    parser.add_argument("--work", type=Path, help="folder to keep the runs in; those that are there are not run again")
    parser.add_argument("extra", nargs="*", help="after --: further options of hf-xformers finetune")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    pretrain(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.work or Path(scratch)
        for method in args.methods.split(","):
            if method not in METHODS:
                raise SystemExit(f"there is no method {method!r}; choose from {', '.join(METHODS)}")
            for task in args.tasks.split(","):
                found = [measure(task, method, seed, folder, args) for seed in range(args.seeds)]
                row = row_of(task, method, found, args)
                write(row, args)
                print(json.dumps(row))


if __name__ == "__main__":
    main()
