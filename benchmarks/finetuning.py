"""Does fine-tuning learn? Variants on texts, documents and images against what needs no learning.

python benchmarks/finetuning.py --data DIR [--tasks sst2,wnut17,multi30k,reviews,captions,digits]
    [--variants bert,longformer] [--size tiny] [--hidden_size N] [--layers N] [--vocab_size N]
    [--learning_rate 1e-3] [--epochs 4] [--pretrain_steps 0] [--max_train_rows N] [-- OPTION ...]

DIR holds `sst2/{train,dev}.tsv` (sentence, label, no header), `wnut17/{train,dev}.conll` and
`multi30k/{train,val,test_2016_flickr}.{en,de}`. Of the first two `dev` is the test split, and the command holds out a
tenth of the training rows for validation. `reviews`: extractive summaries of documents of SST-2's sentences, which are
the sentences that praise; `captions`: abstractive ones of three captions of Multi30k each; `digits`: images of
scikit-learn; `raw_rows.py` makes their files. Each variant starts from random weights, or from `--pretrain_steps` of
masked LM (span corruption for translation) on the task's own training texts, through the command `hf-xformers
finetune`, whose further options follow `--` (rows of the table name them). Baselines, of the test rows: the majority
class; the tags that the training rows give a word most often (a word that they do not have is outside); the source
text as its own translation; the beginning of a document as its summary. Rows replace those of the same task, variant,
start and options in `results/finetuning.json`; a run that is not clear of its baseline is printed and has no row.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import raw_rows
from measure import write_results

from hf_xformers.cli import main
from hf_xformers.finetuning.options import TaskData
from hf_xformers.finetuning.sources import load_rows, read_conll
from hf_xformers.metrics import compute
from hf_xformers.variants import config_class

RESULTS = Path(__file__).parent / "results"
COLUMNS = [
    "task",
    "variant",
    "start",
    "parameters",
    "rate",
    "epochs",
    "steps",
    "seconds",
    "options",
    "metric",
    "validation",
    "test",
    "baseline",
    "of",
]
ENCODERS = ("bert", "longformer", "linear_transformer", "performer", "reformer", "synthesizer")
ENCODER_DECODERS = ("t5", "bart", "linear_transformer", "synthesizer", "talking_heads", "xformer")


def sst2(folder: Path) -> dict[str, Any]:
    data, test = (str(folder / "sst2" / name) for name in ("train.tsv", "dev.tsv"))
    columns = ["--column_names", "text", "label"]
    splits = load_rows(TaskData(data=[data], test_data=[test], column_names=["text", "label"]))
    train, held = list(splits["train"]["label"]), list(splits["test"]["label"])
    majority = Counter(train).most_common(1)[0][0]
    return {
        "head": "ForSequenceClassification",
        "variants": ENCODERS,
        "options": [
            *("--task", "text-classification", "--data", data, "--test_data", test, *columns, "--max_length", "64"),
        ],
        "metric": "accuracy",
        "baseline": ("majority class", sum(label == majority for label in held) / len(held)),
        "texts": list(splits["train"]["text"]),
    }


def wnut17(folder: Path) -> dict[str, Any]:
    files = {name: folder / "wnut17" / f"{name}.conll" for name in ("train", "dev")}
    rows = {name: list(read_conll(path)) for name, path in files.items()}
    counts: dict[str, Counter] = defaultdict(Counter)
    for row in rows["train"]:
        for word, tag in zip(row["tokens"], row["tags"]):
            counts[word][tag] += 1
    usual = {word: found.most_common(1)[0][0] for word, found in counts.items()}
    guess = [[usual.get(word, "O") for word in row["tokens"]] for row in rows["dev"]]
    score = compute("seqeval", guess, [row["tags"] for row in rows["dev"]])["overall_f1"]
    return {
        "head": "ForTokenClassification",
        "variants": ENCODERS,
        "options": [
            *("--task", "token-classification", "--data", str(files["train"]), "--test_data", str(files["dev"])),
            *("--max_length", "128"),
        ],
        "metric": "f1",
        "baseline": ("most frequent tag of the word", score),
        "texts": [" ".join(row["tokens"]) for row in rows["train"]],
    }


def multi30k(folder: Path) -> dict[str, Any]:
    data = [
        str(folder / "multi30k" / f"{split}.{language}") for split in ("train", "val") for language in ("en", "de")
    ]
    test = [str(folder / "multi30k" / f"test_2016_flickr.{language}") for language in ("en", "de")]
    source, target = (Path(path).read_text(encoding="utf-8").splitlines() for path in test)
    languages = ["--source_lang", "en", "--target_lang", "de"]
    return {
        "head": "ForSeq2SeqLM",
        "variants": ENCODER_DECODERS,
        "options": [
            *("--task", "translation", "--data", *data, "--test_data", *test, *languages),
            *("--max_length", "64", "--max_target_length", "64", "--label_smoothing_factor", "0.1"),
        ],
        "metric": "bleu",
        "baseline": ("source copied", compute("sacrebleu", source, target)["bleu"]),
        "texts": [line for path in data[:2] for line in Path(path).read_text(encoding="utf-8").splitlines()],
    }


def reviews(folder: Path) -> dict[str, Any]:
    rows = raw_rows.reviews(folder, _scratch() / "reviews")
    return {
        "head": "ForTokenClassification",
        "variants": ("hibert",),
        "options": ["--task", "extractive-summarization", "--data", *rows, "--summary_sentences", raw_rows.PRAISING],
        "metric": "rougeL",
        "texts": [],
    }


def captions(folder: Path) -> dict[str, Any]:
    rows = raw_rows.captions(folder, _scratch() / "captions")
    return {
        "head": "ForSeq2SeqLM",
        "variants": ("hiersumm",),
        "options": ["--task", "summarization", "--data", *rows, "--max_length", "96", "--max_target_length", "32"],
        "metric": "rougeL",
        "texts": [],
    }


def digits(folder: Path) -> dict[str, Any]:
    images = raw_rows.digits(_scratch() / "digits")
    return {
        "head": "ForImageClassification",
        "colors": "ForSequenceClassification",  # of variants whose tokens are colors
        "variants": ("vision_transformer", "transformer_in_transformer", "image_gpt"),
        "options": ["--task", "image-classification", "--data", images],
        "patches": ["--image_size", "8", "--patch_size", "2"],
        "metric": "accuracy",
        "texts": [],
    }


@functools.cache
def _scratch() -> Path:
    """A folder that is removed with the process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


TASKS = {
    "sst2": sst2,
    "wnut17": wnut17,
    "multi30k": multi30k,
    "reviews": reviews,
    "captions": captions,
    "digits": digits,
}
PERCENT = ("bleu", "rougeL")  # metrics that are so already
CLEAR = 2.0  # points by which a run has to be above its baseline


def measure(task: dict[str, Any], variant: str, args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start = [
            "--variant",
            variant,
            "--size",
            args.size,
            *(f"--{name}={value}" for name, value in geometry(args).items()),
        ]
        if args.pretrain_steps:
            text, model = Path(folder) / "train.txt", Path(folder) / "pretrained"
            text.write_text("\n".join(task["texts"]) + "\n", encoding="utf-8")
            objective = "span" if task["head"] == "ForSeq2SeqLM" else "mlm"
            run(
                *("pretrain", *start, "--objective", objective, "--data", text, "--output_dir", model),
                *("--max_steps", args.pretrain_steps, "--eval_strategy", "no", "--save_strategy", "no"),
                *("--block_size", 128, "--disable_tqdm", "true"),
            )
            start = ["--model", str(model)]
        options = ["--learning_rate", args.learning_rate, "--num_train_epochs", args.epochs]
        options += ["--save_total_limit", 1, "--disable_tqdm", "true"]
        if args.max_train_rows:
            options += ["--max_train_rows", args.max_train_rows]
        output = Path(folder) / "run"
        run("finetune", *start, *task["options"], "--output_dir", output, *options, *extra)
        return json.loads((output / "training_summary.json").read_text())


def geometry(args: argparse.Namespace) -> dict[str, int]:
    """Configuration fields that differ from the size's."""
    given = {"hidden_size": args.hidden_size, "num_hidden_layers": args.layers, "vocab_size": args.vocab_size}
    return {name: value for name, value in given.items() if value is not None}


def described(args: argparse.Namespace) -> str:
    """What a run starts from, for the table."""
    changes = [f"{name.replace('_', ' ')} {value}" for name, value in geometry(args).items()]
    if args.max_train_rows:
        changes.append(f"first {args.max_train_rows} rows")
    return ", ".join([args.size, *changes, f"{args.pretrain_steps} steps" if args.pretrain_steps else "random"])


def extra_settings(extra: list[str]) -> list[str]:
    """`["--name", "value", ...]` and `["--name=value", ...]` as `["name value", ...]`, for the table."""
    words = " ".join(extra).replace("=", " ").split("--")
    return [word.strip() for word in words if word.strip()]


def run(*argv: Any) -> None:
    code = main([str(entry) for entry in argv])
    if code:
        raise SystemExit(code)


def clears(row: dict[str, Any]) -> bool:
    """Whether a run learned more than its baseline knows, on the test rows if it had some of its own."""
    figure = row["validation"] if row["test"] == "" else row["test"]
    return figure >= row["baseline"] + CLEAR


def write(row: dict[str, Any], name: str) -> None:
    """Replaces the row of the same task, variant and start, and the table made of all that say something."""
    path = RESULTS / f"{name}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = sorted(filter(clears, [*(other for other in old if key(other) != key(row)), row]), key=key)
    note = (
        "In percent; the baseline needs no model, and is that of the test rows. Epochs are evaluated and the best"
        " one's weights are taken, chosen on the validation rows that are reported, so `validation` is optimistic;"
        " where the options say `eval_strategy no`, the weights are the last ones and nothing is chosen. `test` rows"
        " choose nothing, but for xf_tener, of which the rate and the start of its characters were set after a look at"
        " words of these rows; rows of sst2 and wnut17 without any have them as their validation rows. `reviews`:"
        " extractive summaries of documents of SST-2's sentences; `captions`: abstractive ones of three captions of"
        " Multi30k; `digits`: scikit-learn's images. `rate`: peak learning rate, absent where it was not recorded."
        f" A run that is not {CLEAR:g} points above its baseline has shown nothing and has no row: most encoders on"
        " wnut17 that train for less than ten epochs without `class_balance`, as they learn to tag nothing, and"
        " xf_linear_transformer on multi30k with its learned positions and post-LN (1.10), in place of which the row"
        " with sinusoids and pre-LN stands. Sizes and steps are small: the table shows that training works, not how"
        " well a mechanism can do."
    )
    write_results(name, rows, COLUMNS, "Fine-tuning: do variants learn?", note)


def key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["task"], row["variant"], row["start"], row.get("options") or ""


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2, wnut17 and multi30k")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--variants", help="default: some that have the task's head")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab_size", type=int)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="peak of the fine-tuning")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--pretrain_steps", type=int, default=0)
    parser.add_argument("--max_train_rows", type=int)
    parser.add_argument("--results", default="finetuning", help="name of the files in results/")
    parser.add_argument("extra", nargs="*", help="after --: further options of hf-xformers finetune")
    args = parser.parse_args(argv)
    return args, args.extra


def benchmark(argv: list[str] | None = None) -> None:
    args, extra = parse(argv)
    for name in args.tasks.split(","):
        task = TASKS[name](args.data)
        variants = args.variants.split(",") if args.variants else task["variants"]
        for variant in variants:
            known = config_class(variant)
            colors = "colors" in task and known.reads_colors != "no"
            if task["colors" if colors else "head"] not in known.heads:
                continue
            further = [] if colors else task.get("patches", [])
            summary = measure({**task, "options": [*task["options"], *further]}, variant, args, extra)
            percent = 1.0 if task["metric"] in PERCENT else 100.0
            test = summary.get(f"test_{task['metric']}")
            own = task.get("baseline")  # else the command's
            of, floor = own or (summary["trivial"]["rule"], summary["baseline_test"][task["metric"]])
            row = {
                "task": name,
                "variant": summary["variant"],
                "start": described(args),
                "parameters": summary["parameters"],
                "rate": f"{args.learning_rate:g}",
                "epochs": args.epochs,
                "steps": summary["steps"],
                "seconds": summary["seconds"],
                "options": ", ".join(extra_settings(extra)),
                "metric": task["metric"],
                "validation": percent * summary[f"eval_{task['metric']}"],
                "test": "" if test is None else percent * test,
                "baseline": percent * floor,
                "of": of,
            }
            print(json.dumps(row))
            if not clears(row):
                print(f"{variant} on {name} is not {CLEAR:g} points above its baseline: no row", file=sys.stderr)
            write(row, args.results)


if __name__ == "__main__":
    benchmark()
