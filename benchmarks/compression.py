"""What ways of compression keep and cost, on SST-2 and WNUT-17.

HF_HUB_OFFLINE=1 python benchmarks/compression.py --data DIR [--tasks sst2,wnut17] [--only "NAME; ..."] [--work DIR]

DIR holds `sst2/{train,dev}.tsv` and `wnut17/{train,dev}.conll`. Nothing is chosen on `dev`, which is the test split
here: the last tenth of the training rows is held out for the commands, and the last weights are taken. A small BERT
(width 128, four layers) is pretrained by masked LM on the training texts and fine-tuned, which is the first row. Each
way of compression starts from that model, and has as many steps again where it trains; `+ training` continues with
plain fine-tuning for as many. Rows of an earlier run with the same task and method are replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from measure import write_results

from hf_xformers.cli import main as command
from hf_xformers.compression.report import Measuring, Row, compare
from hf_xformers.finetuning.sources import read_conll
from hf_xformers.metrics import compute

RESULTS = Path(__file__).parent / "results" / "compression.json"
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "position": "rotary",
    "residual": "pre_ln",
}
TRAIN = "train"  # a way of compression that continues with plain fine-tuning
COMPRESSIONS: dict[str, list[list[Any]]] = {
    "40 % of heads": [["prune", "--method", "heads", "--share", 0.4]],
    "40 % of heads + training": [["prune", "--method", "heads", "--share", 0.4], [TRAIN]],
    "heads by gates": [["prune", "--method", "heads", "--by", "gates", TRAIN]],
    "half of the layers (top)": [["prune", "--method", "layers", "--keep_layers", 2]],
    "half of the layers (loss)": [["prune", "--method", "layers", "--keep_layers", 2, "--by", "loss"]],
    "half of the layers (top) + training": [["prune", "--method", "layers", "--keep_layers", 2], [TRAIN]],
    "50 % of weights": [["prune", "--method", "weights", "--sparsity", 0.5]],
    "2:4 of weights": [["prune", "--method", "weights", "--pattern", "2:4"]],
    "80 % of weights by movement": [["prune", "--method", "weights", "--by", "movement", "--sparsity", 0.8, TRAIN]],
    "distilbert, 2 layers": [["distill", "--method", "distilbert", "--student.num_hidden_layers", 2]],
    "pkd, 2 layers": [["distill", "--method", "pkd", "--student.num_hidden_layers", 2]],
    "tinybert, 2 layers": [["distill", "--method", "tinybert", "--student.num_hidden_layers", 2]],
    "mobilebert, 2 layers": [["distill", "--method", "mobilebert", "--student.num_hidden_layers", 2]],
    "minilm, 2 layers": [
        ["distill", "--method", "minilm", "--method.task_weight", 1, "--student.num_hidden_layers", 2]
    ],
    "theseus, 2 layers": [["distill", "--method", "theseus", "--student.num_hidden_layers", 2]],
    "linear attention, distilbert": [["distill", "--method", "distilbert", "--student.attention", "hedgehog"]],
    "int8 weights": [["quantize", "--weights", "int8"]],
    "int8 weights and activations": [["quantize", "--weights", "int8", "--activations", "int8"]],
    "int4 weights": [["quantize", "--weights", "int4"]],
    "int4 weights, trained for them": [["quantize", "--weights", "int4", "--quantization_aware", "true", TRAIN]],
    "40 % of heads, distilbert, int8": [
        ["prune", "--method", "heads", "--share", 0.4],
        ["distill", "--method", "distilbert", "--student.num_hidden_layers", 2],
        ["quantize", "--weights", "int8"],
    ],
}
QUIET = ("--disable_tqdm", "true", "--use_cpu")
COLUMNS = ["task", "method", "metric", "test", "source", "baseline", "parameters", "size", "time"]
NOTE = (
    "`test`: accuracy of SST-2 (872 sentences) or F1 of entities of WNUT-17 (`dev`), in percent, of which nothing was"
    " chosen. `source`: of the model that the way starts from; where a later run made that one anew, it differs from"
    " the row `fine-tuned`. `baseline`: the majority class; the most frequent tag that the training rows give a word."
    " `parameters` are those that are not zero; `size` on disk and `time` of a batch (16 rows of 64 tokens, no"
    " padding) by those of the fine-tuned model. The model is small: the table shows what the ways cost and keep here,"
    " not how they rank on large ones."
)


def run(*argv: Any) -> None:
    """A command, quietly; its output is shown when it fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command([str(entry) for entry in argv])
    if code:
        raise SystemExit(f"{' '.join(map(str, argv))}\n{output.getvalue()}")


class Task:
    """One task's files, in a folder that keeps the models of a run."""

    def __init__(self, name: str, args: argparse.Namespace, work: Path):
        self.name, self.args, self.work = name, args, work / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.metric = "accuracy" if name == "sst2" else "f1"
        self.kind = "text-classification" if name == "sst2" else "token-classification"
        train, self.test_rows = (_rows(args.data / name, part) for part in ("train", "dev"))
        held = len(train) // 10
        self.train_rows = train[:-held]
        self.files = [self.work / f"{part}.jsonl" for part in ("train", "validation", "test")]
        for path, rows in zip(self.files, (self.train_rows, train[-held:], self.test_rows)):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def floor(self) -> float:
        if self.name == "sst2":
            usual = Counter(row["label"] for row in self.train_rows).most_common(1)[0][0]
            return 100 * sum(row["label"] == usual for row in self.test_rows) / len(self.test_rows)
        counts: dict[str, Counter] = defaultdict(Counter)
        for row in self.train_rows:
            for word, tag in zip(row["tokens"], row["tags"]):
                counts[word][tag] += 1
        tags = {word: found.most_common(1)[0][0] for word, found in counts.items()}
        guess = [[tags.get(word, "O") for word in row["tokens"]] for row in self.test_rows]
        return 100 * compute("seqeval", guess, [row["tags"] for row in self.test_rows])["overall_f1"]

    def pretrained(self) -> Path:
        folder, text = self.work / "pretrained", self.work / "texts.txt"
        if not (folder / "config.json").exists():
            texts = [row["text"] if "text" in row else " ".join(row["tokens"]) for row in self.train_rows]
            text.write_text("\n".join(texts) + "\n", encoding="utf-8")
            shape = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
            run(
                *("pretrain", "--variant", "bert", "--objective", "mlm", "--data", text, "--output_dir", folder),
                *(*shape, "--max_steps", self.args.pretrain_steps, "--block_size", 64, "--learning_rate", 2e-3),
                *("--eval_strategy", "no", "--save_strategy", "no", *QUIET),
            )
        return folder

    def training(self) -> list[Any]:
        """Options of everything that trains on the task."""
        rate = ("--num_train_epochs", self.args.epochs, "--learning_rate", self.args.learning_rate)
        return [*rate, "--eval_strategy", "no", "--save_strategy", "no", *QUIET]

    def tuned(self, start: Path, name: str = "tuned") -> Path:
        folder = self.work / name
        if not (folder / "config.json").exists():
            data = ["--data", self.files[0], "--validation_data", self.files[1], "--max_length", 64]
            data += ["--class_balance", 0.5] if self.name == "wnut17" else []  # else it learns to tag nothing
            run("finetune", "--task", self.kind, "--model", start, "--output_dir", folder, *data, *self.training())
        return folder

    def compressed(self, name: str, steps: list[list[Any]], start: Path) -> Path:
        folder = start
        for number, words in enumerate(steps):
            before, folder = folder, self.work / f"{''.join(letter for letter in name if letter.isalnum())}-{number}"
            if (folder / "config.json").exists():
                continue
            if words == [TRAIN]:
                self.tuned(before, folder.name)
                continue
            trains = TRAIN in words or words[0] == "distill"
            source = "--teacher" if words[0] == "distill" else "--model"
            data = ["--data", self.files[0]] if words[0] == "prune" else ["--data", *self.files[:2]]
            data = [] if words[0] == "quantize" and not trains else data
            run(
                *(word for word in words if word != TRAIN),
                *(source, before, "--output_dir", folder, *data),
                *(self.training() if trains else QUIET[-1:]),
            )
        return folder


def _rows(folder: Path, part: str) -> list[dict[str, Any]]:
    if folder.name == "sst2":
        lines = (folder / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
        return [dict(zip(("text", "label"), line.split("\t"))) for line in lines if line.strip()]
    return [{"tokens": row["tokens"], "tags": row["tags"]} for row in read_conll(folder / f"{part}.conll")]


def benchmark(name: str, args: argparse.Namespace, work: Path) -> None:
    task, wanted = Task(name, args, work), args.only and [way.strip() for way in args.only.split(";")]
    floor, source = task.floor(), task.tuned(task.pretrained())
    measuring = Measuring(eval_data=[str(task.files[2])], time_length=64, time_batches=9)
    measuring.use_cpu = True
    for method, steps in COMPRESSIONS.items():
        if wanted and method not in wanted:
            continue
        before, after = compare(source, task.compressed(method, steps, source), measuring)
        write(task, floor, "fine-tuned", before, before)
        write(task, floor, method, before, after)


def _ratio(before: Row, after: Row) -> float | None:
    return None if before.seconds is None or after.seconds is None else after.seconds / before.seconds


def write(task: Task, floor: float, method: str, before: Row, after: Row) -> None:
    """Replaces the row of the same task and method."""
    row = {
        **{"task": task.name, "method": method, "metric": task.metric, "test": 100 * (after.quality or 0.0)},
        **{"source": 100 * (before.quality or 0.0), "baseline": floor},
        **{"parameters": after.nonzero, "size": after.bytes / before.bytes},
        "time": _ratio(before, after),
    }
    print(json.dumps(row), flush=True)
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = [*(other for other in old if (other["task"], other["method"]) != (task.name, method)), row]
    order = {name: place for place, name in enumerate(["fine-tuned", *COMPRESSIONS])}
    rows.sort(key=lambda entry: (entry["task"], order.get(entry["method"], 99)))
    write_results("compression", rows, COLUMNS, "Compression: what each way keeps and costs", NOTE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2 and wnut17")
    parser.add_argument("--tasks", default="sst2,wnut17")
    parser.add_argument("--only", help="names of ways, with semicolons between")
    parser.add_argument("--epochs", type=float, default=2, help="the committed rows of WNUT-17 had 4")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--pretrain_steps", type=int, default=500)
    parser.add_argument("--work", type=Path, help="folder to keep the models in; what is there is not trained again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.tasks.split(","):
            benchmark(name, args, args.work or Path(scratch))


if __name__ == "__main__":
    main()
