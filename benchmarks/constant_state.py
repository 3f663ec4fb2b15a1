"""SmolLM2 with a constant state: what it loses, what training brings back, and what generation costs.

    bash scripts/real_models.sh
    python benchmarks/constant_state.py --text DIR [--only losses,tasks,answers,speed] [--recipes "NAME;..."]

DIR has WikiText-2 as `train.txt` and `test.txt`: the first is trained on, the second measured. A recipe whose model is
not in --work yet is trained first, by `hf-xformers linearize`; what was measured there before is not measured again,
but for speed. `--only speed` needs no text: 1,024 to 16,384 tokens, in a quarter of an hour of an idle machine. Each
part replaces the rows of the models that it measures in results/constant_state.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_xformers  # noqa: F401  (registers the variants)
from hf_xformers.benchmark import tables
from hf_xformers.benchmark.measure import state_tensors
from hf_xformers.conversion.linearization import Linearization, read_linearization
from hf_xformers.conversion.swap import open_model, swap_components
from hf_xformers.core.cache import make_cache
from hf_xformers.core.saved_files import write_text

RESULTS = Path(__file__).parent / "results"
ROWS = {512: 16, 2048: 6, 8192: 2}  # tokens of a row, and how many rows of the test text are read
CONTEXTS = (1024, 2048, 8192, 16384)
PIECE = 1024  # tokens of a prompt that are read at once
NEW_TOKENS, TURNS = 8, 8  # tokens that are written in a turn, and turns
# Swaps that are measured as they are.
SWAPS: dict[str, dict[str, Any]] = {
    "window 256, 4 sinks": {"type": "sliding_window", "window": 256},
    "window 512, 4 sinks": {"type": "sliding_window", "window": 512},
}
LOLCATS = {"attention": "lolcats", "attention.sinks": 4, "attention.gamma": 0.99, "attention.affine": "true"}
COMMON = {
    "validation_fraction": 0.02,
    "block_size": 1024,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "distillation_steps": 0,
    "save_strategy": "no",
    "logging_steps": 10,
    "seed": 0,
}
# Options of `hf-xformers linearize`, besides COMMON.
RECIPES: dict[str, dict[str, Any]] = {
    "lolcats-512": {**LOLCATS, "attention.window": 512, "transfer_steps": 16, "lora_steps": 16},
    "lolcats-256": {**LOLCATS, "attention.window": 256, "transfer_steps": 24, "lora_steps": 24},
    "window 512, LoRA": {
        "attention": "sliding_window",
        "attention.window": 512,
        "attention.sinks": 4,
        "transfer_steps": 0,
        "lora_steps": 16,
    },
    "lolcats-64 plain": {"attention": "lolcats", "transfer_steps": 24, "lora_steps": 24},
    "hedgehog": {"attention": "hedgehog", "transfer_steps": 24, "lora_steps": 24},
    "gated delta net": {"attention": "gated_delta_net", "transfer_steps": 24, "lora_steps": 24},
}
FAR = ("lolcats-64 plain", "gated delta net")  # too far from the source for rows of 8,192 tokens to tell more
QUESTIONS = (
    "What is the capital of France?",
    "Give me three tips for learning a language.",
    "Write a Python function that adds two numbers.",
)


# ------------------------------------------------------------------------------------------------ training


def train(options: argparse.Namespace, name: str) -> Linearization:
    """The finished run of a recipe in the work folder; what it printed is next to it, with its processor time."""
    folder = options.work / name
    record = read_linearization(folder)
    if record is None or record.status != "finished":
        settings = {"model": options.source, "data": options.text / "train.txt", "output_dir": folder}
        settings |= {**COMMON, **RECIPES[name]}
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (options.work / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "hf_xformers", "linearize", *words, "--use_cpu"]
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (options.work / f"{name}.seconds").write_text(f"{seconds:.0f}")
        record = read_linearization(folder)
    assert record is not None
    return record


# ------------------------------------------------------------------------------------------------ losses


@torch.inference_mode()
def states(model: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """What the head reads to predict all tokens but the first, for each row."""
    return [model.model(input_ids=row[None]).last_hidden_state[0, :-1] for row in rows]


@torch.inference_mode()
def compared(model: Any, source: Any, own: list, theirs: list, rows: torch.Tensor) -> dict[str, float]:
    """Loss, KL(source || model) and how often both have the same most likely answer; logits are made in pieces."""
    found = []
    for mine, other, row in zip(own, theirs, rows, strict=True):
        for part, taught, labels in zip(mine.split(PIECE), other.split(PIECE), row[1:].split(PIECE), strict=True):
            logs, target = (head(x).log_softmax(-1) for head, x in ((model.lm_head, part), (source.lm_head, taught)))
            divergence = (target.exp() * (target - logs)).sum(-1)
            same = (logs.argmax(-1) == target.argmax(-1)).float()
            found.append(torch.stack([-logs.gather(1, labels[:, None])[:, 0], divergence, same]))
    loss, divergence, same = torch.cat(found, 1).mean(1).tolist()
    return {"loss": loss, "KL": divergence, "same": 100 * same}


def test_rows(options: argparse.Namespace, length: int) -> torch.Tensor:
    """Rows at equal distances in the test text."""
    text = (options.text / "test.txt").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(options.source)(text, add_special_tokens=False)["input_ids"])
    count = ROWS[length]
    distance = len(ids) // length // count * length
    return torch.stack([ids[place * distance :][:length] for place in range(count)])


class Losses:
    """By model and length; what was measured before is read from the work folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.file = options, options.work / "losses.json"
        self.known: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.source = open_model(options.source, "ForCausalLM")[0].eval()
        self.states: dict[int, list[torch.Tensor]] = {}

    def __call__(self, name: str, length: int, make: Callable[[], Any]) -> dict[str, float]:
        key = f"{name} at {length}"
        if key not in self.known:
            rows, model = test_rows(self.options, length), make().eval()
            if length not in self.states:
                self.states[length] = states(self.source, rows)
            own = self.states[length] if model is self.source else states(model, rows)
            self.known[key] = compared(model, self.source, own, self.states[length], rows)
            self.file.write_text(json.dumps(self.known, indent=1))
            print(key, self.known[key], flush=True)
        return self.known[key]


def losses(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    records = {name: train(options, name) for name in options.recipes.split(";") if name}
    measured, rows = Losses(options), []
    source = measured.source
    every = list(range(source.config.num_hidden_layers))
    cases = [(name, record.attention, record.layers, record) for name, record in records.items()]
    cases += [(name, attention, every, None) for name, attention in SWAPS.items()]
    for length in ROWS:
        best = measured("source", length, lambda: source)["loss"]
        for name, attention, layers, record in cases:
            if name in FAR and length == max(ROWS):
                continue

            def swap(attention: Any = attention, layers: list[int] = layers) -> Any:
                chosen = {} if layers == every else {"layers": {"attention": layers}}
                return swap_components(source, attention=attention, measure=False, **chosen)[0]

            row: dict[str, Any] = {"model": name, "tokens": length, "rows": ROWS[length], "layers": len(layers)}
            row["source"] = best
            swapped = measured(name if record is None else f"{name}, untrained", length, swap)
            row |= {"swapped": swapped["loss"], "swapped - source": swapped["loss"] - best}
            row |= {"KL, swapped": swapped["KL"], "same answer, swapped, %": swapped["same"]}
            if record is not None:
                found = measured(name, length, lambda name=name: open_model(options.work / name, "ForCausalLM")[0])
                row |= {"trained": found["loss"], "trained - source": found["loss"] - best}
                gap = swapped["loss"] - best
                if gap > 1e-3:  # none, where a row is no longer than the window
                    row["gap recovered, %"] = 100 * (swapped["loss"] - found["loss"]) / gap
                row |= {"KL, trained": found["KL"], "same answer, trained, %": found["same"]}
                row["steps"] = " + ".join(f"{stage.steps} {stage.name}" for stage in record.stages)
                row["processor minutes"] = int((options.work / f"{name}.seconds").read_text()) / 60
            rows.append(row)
    stages = [row for name, record in records.items() for row in stage_rows(name, record)]
    return {"Losses": sorted(rows, key=lambda row: row["tokens"]), "Stages": stages}


def stage_rows(name: str, record: Linearization) -> list[dict[str, Any]]:
    """What each stage of a training made of the loss on held-out rows of the training text."""
    begin = [("source", record.source_loss), ("swap", record.swapped_loss)]
    rows: list[dict[str, Any]] = [{"model": name, "stage": stage, "held out": loss} for stage, loss in begin]
    for stage in record.stages:
        rows.append({"model": name, "stage": stage.name, "held out": stage.loss, "steps": stage.steps})
        rows[-1] |= {"learning rate": stage.learning_rate, "trained parameters": stage.trained}
    return rows


# ------------------------------------------------------------------------------------------------ tasks and answers


def tasks(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """lm-eval with two tasks made of the test text: perplexity of articles, and last words of paragraphs."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(options, Path(folder))
        manager = TaskManager(include_path=folder, include_defaults=False)
        for name, place in models(options).items():
            model = AutoModelForCausalLM.from_pretrained(place).eval()
            tokenizer = AutoTokenizer.from_pretrained(options.source)
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", max_length=2048)
            found = simple_evaluate(wrapped, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
            for task, metrics in TASKS.items():
                for metric in metrics:
                    value = found["results"][task][f"{metric},none"]
                    rows.append({"model": name, "task": task, "metric": metric, "value": value})
                    print(rows[-1], flush=True)
    return {"lm-eval": rows}


TASKS = {"articles": ("word_perplexity",), "last_word": ("acc", "perplexity"), "far_word": ("acc", "perplexity")}
_ROLLING = """task: articles
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
_CLOZE = """task: {name}
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: " {{{{word}}}}"
metric_list: [{{metric: acc}}, {{metric: perplexity}}]
"""
_DATA = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""


def write_tasks(options: argparse.Namespace, folder: Path) -> None:
    text = (options.text / "test.txt").read_text(encoding="utf-8")
    near, far = cloze(text)
    found = {
        "articles": [{"text": article[:3500]} for article in articles(text)[:8]],
        "last_word": near[:48],
        "far_word": far[:24],
    }
    for name, rows in found.items():
        path = folder / f"{name}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        body = _ROLLING if name == "articles" else _CLOZE
        (folder / f"{name}.yaml").write_text(body.format(name=name) + _DATA.format(path=path))


def articles(text: str) -> list[str]:
    """The texts between headings of the first level, ` = Title = `."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(" = ") and not line.startswith(" = = "):
            found.append([])
        if found and line.strip():
            found[-1].append(line.strip())
    return ["\n".join(lines) for lines in found]


def cloze(text: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Two lists of contexts and the word that follows: the last word of a paragraph after that paragraph alone; and a
    capitalized word that the article has had before, but not in the last 3,500 characters (some 800 tokens)."""
    near, far = [], []
    for article in articles(text):
        place = 0
        for line in article.split("\n"):
            words = line.split()
            plain = [i for i, word in enumerate(words) if word.isalpha() and len(word) > 3]
            if len(words) > 40 and plain and len(words) - plain[-1] <= 2:
                near.append({"context": " ".join(words[: plain[-1]]), "word": words[plain[-1]]})
            for i in plain:
                word = words[i]
                before = article[:place] + " ".join(words[:i])
                if word[0].isupper() and i > 5 and words[i - 1].islower() and len(before) > 5000:
                    seen, recent = before[-6500:-3500], before[-3500:]
                    if f" {word} " in seen and word not in recent:
                        far.append({"context": before[-6500:].split(" ", 1)[1], "word": word})
                        break
            place += len(line) + 1
    return spread(near, 48), spread(far, 24)


def spread(items: list[Any], count: int) -> list[Any]:
    return items[:: max(len(items) // count, 1)][:count]


@torch.inference_mode()
def answers(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = [{"question": question} for question in QUESTIONS]
    tokenizer = AutoTokenizer.from_pretrained(options.source)
    for name, place in models(options).items():
        model = AutoModelForCausalLM.from_pretrained(place).eval()
        for row in rows:
            chat = [{"role": "user", "content": row["question"]}]
            given = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            written = model.generate(**given, max_new_tokens=60, do_sample=False)
            row[name] = tokenizer.decode(written[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return {"Answers": rows}


def models(options: argparse.Namespace) -> dict[str, Path]:
    return {"source": options.source, **{name: options.work / name for name in options.models.split(";")}}


# ------------------------------------------------------------------------------------------------ speed


_WRITER: list[Any] = []  # of a worker process: its model, the cache, and the token that is read next


@torch.inference_mode()
def read(folder: Path, context: int) -> dict[str, Any]:
    """Reading `context` tokens, piece by piece."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (1, context))
    cache = make_cache(model.config) if hasattr(model.config, "attention") else None
    begun = time.perf_counter()
    for part in ids.split(PIECE, dim=1):
        found = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
    seconds = time.perf_counter() - begun
    _WRITER[:] = model, cache, found.logits.argmax(-1)
    return {
        "seconds to read": seconds,
        "state, MB": sum(tensor.nbytes for tensor in state_tensors(cache)) / 1e6,
        "process peak, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


@torch.inference_mode()
def write_tokens() -> float:
    """Seconds for each of a few more tokens."""
    model, cache, token = _WRITER
    begun = time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
    _WRITER[2] = token
    return (time.perf_counter() - begun) / NEW_TOKENS


def speed(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """A process for each model; they write in turns, so that what slows the machine for a while slows all of them."""
    rows, processes = [], multiprocessing.get_context("spawn")
    for context in options.contexts:
        with contextlib.ExitStack() as stack:
            workers = {name: stack.enter_context(processes.Pool(1)) for name in models(options)}
            found = {name: workers[name].apply(read, (place, context)) for name, place in models(options).items()}
            turns = [{name: worker.apply(write_tokens) for name, worker in workers.items()} for _ in range(TURNS)]
        for name, row in found.items():
            rate = 1 / statistics.median(turn[name] for turn in turns)
            ratio = statistics.median(turn["source"] / turn[name] for turn in turns)
            rows.append({"model": name, "context": context, **row, "tokens per second": rate, "against source": ratio})
            print(rows[-1], flush=True)
    return {"Generation, one row of text": rows}


# ------------------------------------------------------------------------------------------------ files

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, list[dict[str, Any]]]]] = {
    "losses": losses,
    "tasks": tasks,
    "answers": answers,
    "speed": speed,
}
NOTE = (
    "SmolLM2-135M-Instruct (a Llama of 30 layers, 9 heads over 3 of keys and values) with another attention whose"
    " state does not grow, in as many layers as `layers` says. Trained on WikiText-2's validation text, measured "
    "on its test text. Losses are nats per token of rows of so many `tokens`, the same rows for every model; "
    "`swapped` is before training. `gap recovered` is (swapped - trained) / (swapped - source); above 100 % the "
    "training brought more than the swap cost, as the source has not been trained on such text. `KL` is that of "
    "the predictions from the source's, in nats. `processor minutes` are those of the training, which ran next to "
    "other work. Perplexities count words. `far_word` asks for a name that the text has had, but not in the last "
    "3,500 characters. Prompts are read 1,024 tokens at a time; `state` is what the cache "
    "holds, `process peak` includes the weights and the libraries; `against source`: tokens per second by those of "
    "the source, which writes in turns with the model: the median of their ratios."
)


def write(found: dict[str, list[dict[str, Any]]]) -> None:
    path = RESULTS / "constant_state.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    order = ["Losses", "Stages", "lm-eval", "Answers", "Generation, one row of text"]
    merged = {**known, **{title: joined(known.get(title, []), rows) for title, rows in found.items()}}
    sections = {title: merged[title] for title in order if title in merged}
    where = machine()
    tables.write_dated(path, {"machine": where, **sections})
    parts = ["# SmolLM2 with a constant state", NOTE, tables.about(where)]
    for title, rows in sections.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        parts += [f"## {title}", tables.folded([shown(row) for row in rows], columns, f"constant_state/{title}")]
    write_text(RESULTS / "constant_state.md", "\n\n".join(parts) + "\n")


def joined(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of models that were not measured now stay."""
    measured = {row.get("model") for row in now}
    return now + [row for row in before if row.get("model") not in measured]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Losses with three decimals: the gaps are small."""
    return {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--text", type=Path, help="folder of train.txt and test.txt")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of the trained models")
    parser.add_argument(
        "--recipes", default=";".join(RECIPES), help="which to train and measure, with semicolons between"
    )
    parser.add_argument("--models", default="lolcats-512", help="those for tasks, answers and speed, as --recipes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure")
    parser.add_argument("--contexts", type=lambda text: [int(x) for x in text.split(",")], default=CONTEXTS)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if options.text is None and set(chosen) & {"losses", "tasks"}:
        parser.error("give --text, the folder of train.txt and test.txt")
    options.work.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        found = PARTS[part](options)
        if not options.no_write:
            write(found)


if __name__ == "__main__":
    main()
