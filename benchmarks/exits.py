"""What early exits are worth: accuracy, depth and time of trained classifiers at each setting of their rule.

python benchmarks/exits.py --data DIR [--variants deebert,pabee,voting_early_exit,token_early_exit] [--size tiny]
    [--hidden_size 64] [--layers 6] [--vocab_size 2048] [--learning_rate 1e-3] [--epochs 3] [--max_train_rows N]
    [--results exits] [-- OPTION ...]

DIR holds `sst2/{train,dev}.tsv` (sentence, label, no header). Nothing is chosen on `dev`, which is the test split
here; the first tenth of the training rows is the validation split, as which `hf-xformers finetune` needs one. Each
variant starts from random weights and is trained by that command, whose further options follow `--`; DeeBERT's
classifiers learn in a second stage. The tokens of a text have no sentiment of their own: for token_early_exit each
word is tagged with that of its sentence, and a sentence is classified by the majority of its words' tags. Time is that
of the test split in batches, the best of three passes, without early exits 1.00. The baseline is the majority class.
Rows replace those of the same variant in `results/exits.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measure import write_results
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from hf_xformers.benchmark.measure import Bystanders
from hf_xformers.cli import main as command

RESULTS = Path(__file__).parent / "results"
COLUMNS = ["variant", "start", "epochs", "rows", "setting", "accuracy", "mean layers", "of", "time", "majority"]
COLUMNS += ["others busy"]
VARIANTS = ("deebert", "pabee", "voting_early_exit", "token_early_exit")
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
NOTE = (
    "Test split of SST-2, {sentences} sentences, of which nothing was chosen; `accuracy` in percent, compared with the"
    " majority class. `mean layers`: passed by a row (token_early_exit: by a word); `time`: of the whole split,"
    " without early exits 1.00. The first setting of a variant is all layers. Models are small and start from random"
    " weights: the table compares settings of one model, not variants."
)


def rows_of(path: Path) -> list[tuple[str, str]]:
    pairs = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [(text, label) for text, label in pairs]


def described(args: argparse.Namespace) -> str:
    """What a variant starts from, for the table."""
    words = " ".join(args.extra).replace("=", " ").split("--")
    own = [word.strip().replace("_", " ") for word in words if word.strip()]
    shape = [f"hidden size {args.hidden_size}", f"vocab size {args.vocab_size}"]
    return ", ".join([args.size, *shape, *own, "random"])


def run(*argv: Any) -> None:
    code = command([str(entry) for entry in argv])
    if code:
        raise SystemExit(code)


def train(variant: str, args: argparse.Namespace, folder: Path) -> Path:
    """A fine-tuned model of a variant."""
    rows = rows_of(args.data / "sst2" / "train.tsv")[: args.max_train_rows]
    held = max(len(rows) // 10, 1)
    tagged = variant == "token_early_exit"
    files = {"train": rows[held:], "validation": rows[:held]}
    for name, part in files.items():
        if tagged:
            blocks = ("\n".join(f"{word}\tS{label}" for word in text.split()) for text, label in part)
            (folder / f"{name}.conll").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
        else:
            lines = (f"{text}\t{label}" for text, label in part)
            (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = [folder / f"{name}.{'conll' if tagged else 'tsv'}" for name in files]
    task = ["token-classification"] if tagged else ["text-classification", "--column_names", "text", "label"]
    common = ["--task", *task, "--data", *data, "--max_length", 64, "--disable_tqdm", "true"]
    common += ["--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    common += ["--learning_rate", args.learning_rate, "--num_train_epochs", args.epochs]
    shape = {"hidden_size": args.hidden_size, "num_hidden_layers": args.layers, "vocab_size": args.vocab_size}
    start = ["--variant", variant, "--size", args.size, *(f"--{name}={value}" for name, value in shape.items())]
    run("finetune", *start, *args.extra, *common, "--output_dir", folder / "run")
    if variant != "deebert":
        return folder / "run"
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run")
    model.exits.begin_ramps(model)
    model.save_pretrained(folder / "run")
    run("finetune", "--model", folder / "run", *common, "--output_dir", folder / "exits")
    return folder / "exits"


@torch.no_grad()
def measured(model: Any, batches: list[dict[str, Any]], tagged: bool) -> dict[str, float]:
    """Accuracy, mean layers and seconds of the batches, and how busy others kept the machine meanwhile."""
    best, bystanders = float("inf"), Bystanders()
    for _ in range(4):  # the first warms up
        right = layers = count = rows = 0.0
        begun = time.process_time()
        for batch in batches:
            output = model(**batch["inputs"])
            if tagged:
                words = batch["words"]
                votes = (output.logits.argmax(-1) * words).sum(1) * 2 > words.sum(1)
                right += (votes.long() == batch["labels"]).sum().item()
                layers += (output.exit_layers * words).sum().item()
                count += words.sum().item()
            else:
                right += (output.logits.argmax(-1) == batch["labels"]).sum().item()
                layers += output.exit_layers.sum().item()
                count += len(output.logits)
            rows += len(batch["labels"])
        best = min(best, time.process_time() - begun)
    found = {"accuracy": 100 * right / rows, "mean layers": layers / count, "seconds": best}
    return {**found, "others busy": bystanders.busy()}


def batches_of(
    rows: list[tuple[str, str]], tokenizer: Any, labels: dict[str, int], size: int, tagged: bool
) -> list[dict[str, Any]]:
    """Sentences in batches; `words` [B, T], where words have tags: the first piece of each."""
    found = []
    rows = sorted(rows, key=lambda row: len(row[0]))
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        texts: list[Any] = [text for text, _ in part]
        if tagged:  # words as the command reads them: pieces of a byte-level vocabulary hold the space before them
            texts = [[f" {word}" for word in text.split()] for text in texts]
        encoded = tokenizer(
            texts, is_split_into_words=tagged, padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        batch = {"labels": torch.tensor([labels[label] for _, label in part])}
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        if tagged:
            batch["words"] = torch.zeros_like(encoded["input_ids"])
            for row in range(len(part)):
                ids = encoded.word_ids(row)
                for place, word in enumerate(ids):
                    batch["words"][row, place] = int(word is not None and (place == 0 or ids[place - 1] != word))
            inputs["tag_mask"] = batch["words"]
        found.append({"inputs": inputs, **batch})
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--max_train_rows", type=int)
    parser.add_argument("--results", default="exits", help="name of the files in results/")
    parser.add_argument("extra", nargs="*", help="after --: further options of hf-xformers finetune")
    args = parser.parse_args(argv)
    test = rows_of(args.data / "sst2" / "dev.tsv")
    majority = Counter(label for _, label in rows_of(args.data / "sst2" / "train.tsv")).most_common(1)[0][0]
    floor = 100 * sum(label == majority for _, label in test) / len(test)
    for variant in args.variants.split(","):
        tagged = variant == "token_early_exit"
        with tempfile.TemporaryDirectory() as folder:
            path = train(variant, args, Path(folder))
            tokenizer = AutoTokenizer.from_pretrained(path)
            heads = AutoModelForTokenClassification if tagged else AutoModelForSequenceClassification
            model = heads.from_pretrained(path).eval()
        names = {str(name).removeprefix("S"): number for name, number in model.config.label2id.items()}
        batches = batches_of(test, tokenizer, names, 32, tagged)
        spec = model.config.stack
        settings = {"exit_threshold": THRESHOLDS} if tagged else spec.settings(model.config)
        rows: list[dict[str, Any]] = []
        for field, values in settings.items():
            for value in values:
                setattr(spec, field, value)
                found = measured(model, batches, tagged)
                seconds = found.pop("seconds")
                rows.append(
                    {
                        "variant": f"xf_{variant}",
                        "start": described(args),
                        "epochs": args.epochs,
                        "rows": args.max_train_rows or "all",
                        "setting": f"{field} {value:g}",
                        **found,
                        "of": args.layers,
                        "time": seconds,
                        "majority": floor,
                    }
                )
        whole = rows[0]["time"]
        for row in rows:
            row["time"] /= whole
            print(json.dumps(row))
        path = RESULTS / f"{args.results}.json"
        old = json.loads(path.read_text())["rows"] if path.exists() else []
        kept = [row for row in old if row["variant"] != f"xf_{variant}"]
        title = "Early exits: accuracy against depth and time"
        write_results(args.results, kept + rows, COLUMNS, title, NOTE.format(sentences=len(test)))


if __name__ == "__main__":
    main()
