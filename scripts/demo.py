#!/usr/bin/env python
"""The two halves of `scripts/demo.sh`: trains a model with `hf-xformers pretrain`, and lets the saved folder speak.

    python scripts/demo.py train mlm
    python scripts/demo.py show mlm

What `show` does is plain transformers. The one line that a user of hf_xformers adds is `import hf_xformers`, which
registers the families with the Auto classes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    pipeline,
)
from transformers.utils import logging

from hf_xformers import XFormerConfig  # importing the package registers the families
from hf_xformers.objectives import build_objective
from hf_xformers.training.building import grown_positions
from hf_xformers.training.run_folder import SUMMARY_FILE
from hf_xformers.training.text import TextData, load_splits, make_rows

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from measure import interleaved_seconds, memory_in_fresh_process

AUTO_CLASS = {"mlm": AutoModelForMaskedLM, "clm": AutoModelForCausalLM, "span": AutoModelForSeq2SeqLM}
PROMPTS = {
    "mlm": [
        "Return a {mask} of strings.",
        "Raise an {mask} if the name is not found.",
        "The default {mask} is None.",
        "New in {mask} 3.8.",
        "This {mask} returns the name of the file.",
        "Return True if the object {mask} a string.",
        "If the argument {mask} given, it must be an integer.",
        "Return the {mask} of items in the list.",
    ],
    "clm": ["Return a new", "This method", "If the file does not exist,", "Raises"],
    "span": [
        "Return a {mask} of strings.",
        "Raise an {mask} if the name is not found.",
        "The default {mask} is None.",
        "New in {mask} 3.8.",
        "This {mask} returns the name of the file.",
        "Return True if the object {mask} a string.",
        "If the argument {mask} given, it must be an integer.",
        "Return the {mask} of items in the list.",
    ],
}
LONG = 4096  # tokens at which a training step is measured
MOST_ROWS = 800  # of held-out text, to score the words of an encoder-decoder
console = Console(highlight=False)


@dataclass(frozen=True)
class Demo:
    """objective, variant: of `hf-xformers pretrain`. options: of the model that learns within minutes when tiny.
    length: tokens of a row. batch: rows of a step."""

    objective: str
    variant: str
    options: str
    steps: int
    length: int = 256
    batch: int = 8
    learning_rate: str = "5e-3"


# Few layers, norms before the sublayers, positions that speak from the first step, no dropout in so short a run, and a
# small vocabulary of whole words: each of them takes part in leaving the plateau of token frequencies early.
_WORDS = "--tokenizer_type wordpiece --vocab_size 2048 --hidden_dropout_prob 0"
_EARLY = "--residual pre_ln --position rotary"
_WINDOW = "--attention_probs_dropout_prob 0 --block cpe --attention.attention_window 128"
# A decoder has to find the gap that it is asked for before it can learn what stands there. What brings that about
# within a minute: rows as short as a sentence, a few gaps of a word or two (the last is the row's end, with no
# text behind it), tokens that are told apart from the first step (vectors of unit variance, as in the first
# Transformer), and a bias that learns how frequent words are, which would otherwise move all vectors one way. The
# vocabulary has as many words besides its sentinels.
_GAPS = (
    f"--tokenizer_type wordpiece --vocab_size 2144 --hidden_dropout_prob 0 {_EARLY} --initializer xavier"
    " --embedding.scale true --tie_word_embeddings false --head.bias true --num_decoder_layers 1"
    " --attention longformer --attention.attention_window 32 --attention_probs_dropout_prob 0 --block cpe"
    " --decoder.attention dense --decoder.block vanilla"
    " --objective.noise_density 0.25 --objective.mean_noise_span_length 1.33"
)
DEMOS = {
    "mlm": Demo("mlm", "longformer", f"{_WORDS} {_EARLY} {_WINDOW}", steps=1000),
    "clm": Demo("clm", "linear_transformer", f"{_WORDS} {_EARLY}", steps=1000),
    "t5": Demo("span", "xformer", _GAPS, steps=2000, length=16, batch=64, learning_rate="3e-3"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=("train", "show"))
    parser.add_argument("demo", nargs="?", choices=list(DEMOS), default="mlm")
    arguments = parser.parse_args(argv)
    folder = Path("runs") / f"demo-{arguments.demo}"
    if arguments.part == "train":
        return train(arguments.demo, folder)
    if not (folder / "config.json").is_file():
        parser.error(f"{folder} has no config.json; train first: python scripts/demo.py train {arguments.demo}")
    show(DEMOS[arguments.demo].objective, folder)
    return 0


# ------------------------------------------------------------------------------------------------ train


def command(name: str, folder: Path) -> list[str]:
    """The arguments of `hf-xformers`, with what the environment changes."""
    demo, given = DEMOS[name], os.environ.get
    variant, size = given("VARIANT") or demo.variant, given("SIZE") or "tiny"
    same = variant == demo.variant
    tuned = same and size == "tiny"
    steps = int(given("STEPS") or demo.steps)
    batch = given("BATCH") or str(demo.batch)
    rate = given("LEARNING_RATE") or (demo.learning_rate if tuned else None)
    return [
        *shlex.split(f"pretrain --variant {variant} --objective {demo.objective} --data stdlib --size {size}"),
        *shlex.split(f"--output_dir {folder} --max_steps {steps} --block_size {given('LENGTH') or demo.length}"),
        *shlex.split(f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch}"),
        *(["--learning_rate", rate] if rate else []),
        *(shlex.split(demo.options) if same else []),
        *(["--num_hidden_layers", "2"] if tuned else []),
        *shlex.split(f"--eval_on_start true --eval_steps {steps} --logging_steps {-(-steps // 10)}"),
        *shlex.split("--save_strategy no --overwrite_output_dir --disable_tqdm true --seed 0"),
    ]


def train(name: str, folder: Path) -> int:
    """Runs the command and says which it is."""
    from hf_xformers.cli import main as hf_xformers

    arguments = command(name, folder)
    console.print(f"$ hf-xformers {shlex.join(arguments)}\n", markup=False)
    return hf_xformers(arguments)


# ------------------------------------------------------------------------------------------------ show


def show(objective: str, folder: Path) -> None:
    torch.manual_seed(0)
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AUTO_CLASS[objective].from_pretrained(folder).eval()
    console.print(
        f"\nA new process: {AUTO_CLASS[objective].__name__}.from_pretrained('{folder}') gives {type(model).__name__}"
        f" with {model.num_parameters():,} parameters and a vocabulary of {len(tokenizer):,}.\n"
    )
    if objective == "span":
        print_words(model, tokenizer, folder)
    else:
        print_learning(folder)
    print_answers(objective, model, tokenizer)
    print_costs(objective, folder)


def print_learning(folder: Path) -> None:
    """Held-out figures before and after training, as the Trainer recorded them, next to what token frequencies
    reach."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    before, *_, after = [entry for entry in history if "eval_loss" in entry]
    table = Table("on held-out text", title="what it learned", title_justify="left")
    for column in ("before", "token frequencies", f"after {after['step']} steps"):
        table.add_column(column, justify="right")
    for name, key, form in (("loss (nats per token)", "loss", ".2f"), ("accuracy", "accuracy", ".1%")):
        values = before[f"eval_{key}"], after[f"eval_baseline_{key}"], after[f"eval_{key}"]
        table.add_row(name, *(format(value, form) for value in values))
    console.print(table)
    times = after["eval_accuracy"] / after["eval_baseline_accuracy"]
    console.print(f"Right {times:.1f} times as often as always guessing the most frequent token.\n")


def print_words(model: Any, tokenizer: Any, folder: Path) -> None:
    """How often the decoder is right about held-out words. Sentinels and ends, most of the targets of short rows, are
    always the same: figures of all tokens would flatter a model that has learned nothing else."""
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    objective = build_objective(summary["objective"])
    texts = load_splits(TextData(data=summary["data"]["data"]))["validation"]
    rows = make_rows(texts, tokenizer, objective, summary["block_size"], whole=True)
    batch = objective.collator(tokenizer, seed=0).as_static()(
        [rows[index] for index in range(0, len(rows), -(-len(rows) // MOST_ROWS))]  # of all documents
    )
    labels, specials = batch["labels"], torch.tensor(tokenizer.all_special_ids)
    words = (labels >= 0) & ~torch.isin(labels, specials)
    with torch.no_grad():
        right = (model(**batch).logits.argmax(-1) == labels)[words].float().mean().item()
    counts = labels[words].bincount()
    floor, usual = (counts.max() / words.sum()).item(), tokenizer.decode(counts.argmax().item())
    table = Table("on held-out text", title="what it learned", title_justify="left")
    for column in ("token frequencies", f"after {summary['steps']} steps"):
        table.add_column(column, justify="right")
    table.add_row("accuracy, words alone", f"{floor:.1%}", f"{right:.1%}")
    console.print(table)
    console.print(f"Right {right / floor:.1f} times as often as always guessing {usual!r}, the most frequent one.\n")


def print_answers(objective: str, model: Any, tokenizer: Any) -> None:
    """What the model makes of a few prompts."""
    table = Table("prompt", "answer", title="what it says", title_justify="left")
    answers = {"mlm": fill_masks, "clm": continue_texts, "span": fill_gaps}[objective]
    for prompt, answer in answers(model, tokenizer):
        table.add_row(*(one_line(text).replace("[", r"\[") for text in (prompt, answer)))
    console.print(table)


def fill_masks(model: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """The three likeliest tokens with their probabilities."""
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    texts = [prompt.format(mask=tokenizer.mask_token) for prompt in PROMPTS["mlm"]]
    return [
        (text, ", ".join(f"{guess['token_str'].strip()} {guess['score']:.0%}" for guess in fill(text)))
        for text in texts
    ]


def continue_texts(model: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """The likeliest continuation of a few tokens; so small a model goes round in circles unless tokens that it has
    used become less likely."""
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.3, "return_full_text": False}
    return [(prompt, write(prompt, **options)[0]["generated_text"]) for prompt in PROMPTS["clm"]]


def fill_gaps(model: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Each text with what the decoder says for the first sentinel; transformers 5 has no pipeline for
    encoder-decoders."""
    rows = []
    start, stop = (tokenizer.convert_tokens_to_ids(f"<extra_id_{index}>") for index in range(2))
    for prompt in PROMPTS["span"]:
        inputs = tokenizer(prompt.format(mask="<extra_id_0>"), return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
        first = ids[ids.index(start) + 1 :] if start in ids else ids
        first = first[: first.index(stop)] if stop in first else first
        said = tokenizer.decode(first, skip_special_tokens=True)
        rows.append((prompt.format(mask="___"), prompt.format(mask=said).replace(" ##", "")))
    return rows


def one_line(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------ cost


def training_step(objective: str, folder: str, dense: bool, length: int) -> Callable[[], None]:
    """Forward and backward of one row of `length` tokens, with the folder's model or the same one with dense
    attention; both without attention dropout, for which dense attention would leave its fast kernel."""
    config = AutoConfig.from_pretrained(folder, attention_probs_dropout_prob=0.0)
    fields = {**config.to_dict(), **grown_positions(config, length)}
    for key in ("model_type", "transformers_version", "architectures"):
        fields.pop(key, None)
    config = XFormerConfig(**with_dense_attention(fields)) if dense else type(config)(**fields)
    model = AUTO_CLASS[objective].from_config(config).train()
    ids = torch.randint(0, config.vocab_size, (1, length))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def with_dense_attention(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config with dense attention in every layer."""
    layers = {
        index: {name: value for name, value in layer.items() if name != "attention"}
        for index, layer in (fields.get("per_layer_config") or {}).items()
    }
    changed = {"attention": "dense", "per_layer_config": {index: layer for index, layer in layers.items() if layer}}
    if "attention" in (fields.get("decoder") or {}):
        changed["decoder"] = {**fields["decoder"], "attention": "dense"}
    return {**fields, **changed}


def print_costs(objective: str, folder: Path) -> None:
    """Time and memory of a training step next to dense attention's, measured here and now."""
    towers = AutoConfig.from_pretrained(folder).tower_configs()
    kinds = [layer.attention.type for tower in towers for layer in tower.layer_configs()]
    kind = next((kind for kind in kinds if kind != "dense"), None)
    if kind is None:
        return
    length = int(os.environ.get("COST_LENGTH") or LONG)
    names = {kind: False, "dense": True}
    try:
        steps = {name: training_step(objective, str(folder), dense, length) for name, dense in names.items()}
    except ValueError as error:  # other parts of the model ask for its own attention
        console.print(f"A training step is not compared with dense attention: {error}", markup=False)
        return
    with warnings.catch_warnings(record=True) as remarks:  # that other programs ran meanwhile, say
        warnings.simplefilter("always")
        seconds = {name: statistics.median(runs) for name, runs in interleaved_seconds(steps, rounds=3).items()}
    memory = {
        name: memory_in_fresh_process(training_step, objective, str(folder), dense, length, repeats=1)
        for name, dense in names.items()
    }
    table = Table("attention", title=f"a training step on one row of {length:,} tokens", title_justify="left")
    for column in ("seconds", "peak MiB"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_row(name, f"{seconds[name]:.2f}", f"{memory[name] / 2**20:,.0f}")
    faster, smaller = seconds["dense"] / seconds[kind], memory["dense"] / memory[kind]
    table.add_row(f"dense / {kind}", f"{faster:.1f} times", f"{smaller:.1f} times")
    console.print(table)
    for remark in remarks:
        console.print(f"Note: {remark.message}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
