"""Tiny data for every task, with something to learn, and runs of the command on it that take a second or two."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hf_xformers.cli
from hf_xformers.data import train_tokenizer
from hf_xformers.variants import config_class, family
from tests.training.runs import SHAPE, flags

# Runs that neither evaluate nor save on the way.
BARE = {"load_best_model_at_end": "false", "eval_strategy": "no", "save_strategy": "no"}

GOOD, BAD, REST = ["fine", "great", "sunny"], ["awful", "dull", "rainy"], ["day", "the", "was", "it", "film", "a"]


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        label = draw.randrange(2)
        words = [draw.choice(REST) for _ in range(draw.randint(2, 6))]
        words.insert(draw.randrange(len(words) + 1), draw.choice((BAD, GOOD)[label]))
        made.append((" ".join(words), label))
    return made


def write_lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def classification(folder: Path, count: int = 64) -> list[str]:
    """A CSV with a header and a TSV without one are both read; here the CSV."""
    for split, size, seed in (("train", count, 0), ("dev", 24, 1)):
        lines = [f'"{text}",{label}' for text, label in sentences(size, seed)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return [str(folder / "train.csv"), str(folder / "dev.csv")]


def regression(folder: Path) -> list[str]:
    rows = [{"text": text, "label": text.split().count("a") + label / 2} for text, label in sentences(64, 0)]
    return [str(write_lines(folder / "train.jsonl", rows))]


def tagging(folder: Path, count: int = 48) -> list[str]:
    for split, size, seed in (("train", count, 0), ("dev", 16, 1)):
        text = ""
        for words, _ in sentences(size, seed):
            for word in words.split():
                tag = "B-GOOD" if word in GOOD else "B-BAD" if word in BAD else "O"
                text += f"{word}\t{tag}\n"
            text += "\n"
        (folder / f"{split}.conll").write_text(text)
    return [str(folder)]


def answering(folder: Path, no_answer: bool = False) -> list[str]:
    rows = []
    for index, (text, _) in enumerate(sentences(40, 0)):
        words = text.split()
        answer = next(word for word in words if word in GOOD + BAD)
        start = text.index(answer)
        answers = {"text": [answer], "answer_start": [start]}
        if no_answer and index % 4 == 0:
            answers = {"text": [], "answer_start": []}
        rows.append({"question": "how was it", "context": text, "answers": answers})
    return [str(write_lines(folder / "train.jsonl", rows))]


def choice(folder: Path) -> list[str]:
    draw = random.Random(0)
    rows = []
    for _ in range(40):
        label = draw.randrange(2)
        endings = [draw.choice(BAD), draw.choice(BAD)]
        endings[label] = draw.choice(GOOD)
        rows.append({"sent1": "it was", "sent2": "a", "ending0": endings[0], "ending1": endings[1], "label": label})
    return [str(write_lines(folder / "train.jsonl", rows))]


def translation(folder: Path) -> list[str]:
    """Every word has one translation."""
    for split, size, seed in (("train", 64, 0), ("val", 16, 1)):
        texts = [text for text, _ in sentences(size, seed)]
        (folder / f"{split}.en").write_text("\n".join(texts) + "\n")
        (folder / f"{split}.xx").write_text("\n".join(text.upper() for text in texts) + "\n")
    return [str(folder)]


def summarization(folder: Path) -> list[str]:
    rows = [
        {"document": text, "summary": next(word for word in text.split() if word in GOOD + BAD)}
        for text, _ in sentences(48, 0)
    ]
    return [str(write_lines(folder / "train.jsonl", rows))]


def language(folder: Path) -> list[str]:
    (folder / "train.txt").write_text("\n".join(text for text, _ in sentences(80, 0)) + "\n")
    return [str(folder / "train.txt")]


def pretrained(folder: Path, variant: str = "bert", head: str = "ForMaskedLM", **fields: Any) -> Path:
    """A model that could have been pretrained, with its tokenizer."""
    torch.manual_seed(0)
    texts, template = [text for text, _ in sentences(64, 0)], "cls_sep"
    if head == "ForSeq2SeqLM":  # translations are in capitals
        texts, template = texts + [text.upper() for text in texts], "eos"
    tokenizer = train_tokenizer(texts, vocab_size=300, num_sentinels=0, template=template)
    if head == "ForCausalLM":
        tokenizer.bos_token = tokenizer.eos_token
    special = {"pad_token_id": 0, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {**SHAPE, "vocab_size": 300, "max_position_embeddings": 64, **special, **fields}
    family(variant)[head](config_class(variant)(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


DATA = {
    "text-classification": classification,
    "regression": regression,
    "token-classification": tagging,
    "question-answering": answering,
    "multiple-choice": choice,
    "translation": translation,
    "summarization": summarization,
    "language-modeling": language,
}
OPTIONS = {
    "translation": {"source_lang": "en", "target_lang": "xx"},
    "question-answering": {"max_length": 16},
    "language-modeling": {"max_length": 16},
}
VARIANTS = {"translation": "t5", "summarization": "bart"}


def command(task: str, data: list[str], output: Path, /, **options) -> list[str]:
    """A command line for a task from random weights, unless `model` is among the options."""
    shape = {} if options.get("model") else {**SHAPE, "variant": VARIANTS.get(task, "bert"), "vocab_size": 300}
    defaults = {
        **shape,
        **OPTIONS.get(task, {}),
        "task": task,
        "output_dir": output,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "max_target_length": 12 if task in ("translation", "summarization") else None,
        "validation_fraction": 0.25,
        "disable_tqdm": "true",
        "use_cpu": True,
    }
    merged = {**defaults, **options}
    return [*flags(**merged), "--data", *data]


def finetune(task: str, data: list[str], output: Path, /, *extra: str, **options) -> dict:
    """Runs the command in this process, fails with it, and returns the summary."""
    code = hf_xformers.cli.main(["finetune", *command(task, data, output, **options), *extra])
    assert code == 0
    return json.loads((output / "training_summary.json").read_text())


def predictions(output: Path, split: str = "validation") -> list[dict]:
    return [json.loads(line) for line in (output / f"predictions_{split}.jsonl").read_text().splitlines()]


def picture_folder(root: Path, picture: Callable[[str, int], Any], kinds: tuple[str, str]) -> Path:
    """train/CLASS/N.png and test/CLASS/N.png, of pictures made from a class and a number."""
    for split, count in (("train", 60), ("test", 12)):
        for number in range(count):
            kind = kinds[number % 2]
            place = root / split / kind
            place.mkdir(parents=True, exist_ok=True)
            picture(kind, number + 1000 * (split == "test")).save(place / f"{number}.png")
    return root
