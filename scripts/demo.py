#!/usr/bin/env python
"""Shows what `scripts/demo.sh` trained: loads the folder through the Auto classes and lets the model speak.

    python scripts/demo.py runs/demo-mlm --objective mlm --length 2048

Everything here is plain transformers. The one line that a user of hf_xformers adds is `import hf_xformers`, which
registers the families with the Auto classes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

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

from hf_xformers import XFormerConfig  # importing the package registers the families

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from measure import interleaved_seconds, memory_in_fresh_process

AUTO_CLASS = {"mlm": AutoModelForMaskedLM, "clm": AutoModelForCausalLM, "span": AutoModelForSeq2SeqLM}
PROMPTS = {
    "mlm": ["Return the {mask} of the list.", "Raise an error if the {mask} is not found."],
    "clm": ["Return a new", "This function"],
    "span": ["Return the {mask} of the list.", "Raise an error if {mask} is not found."],
}
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="folder that `hf-xformers pretrain` wrote")
    parser.add_argument("--objective", choices=list(AUTO_CLASS), default="mlm")
    parser.add_argument(
        "--length", type=int, help="tokens of a row in training: compares time and memory there with dense"
    )
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} has no config.json; run scripts/demo.sh first")

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AUTO_CLASS[arguments.objective].from_pretrained(arguments.model).eval()
    console.print(
        f"{AUTO_CLASS[arguments.objective].__name__}.from_pretrained gave a [bold]{type(model).__name__}[/] with "
        f"{model.num_parameters():,} parameters and a vocabulary of {len(tokenizer):,}."
    )
    print_losses(arguments.model)
    print_answers(arguments.objective, model, tokenizer)
    if arguments.length is not None:
        print_costs(arguments.objective, arguments.model, arguments.length)
    print_places(arguments.model)
    return 0


def print_losses(folder: Path) -> None:
    """The held-out loss before and after training, as the Trainer recorded it."""
    state = folder / "trainer_state.json"
    history = json.loads(state.read_text())["log_history"] if state.is_file() else []
    losses = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    if len(losses) < 2:
        console.print(f"{state} has no evaluations before and after training to compare.")
        return
    table = Table("", "step", "held-out loss", "perplexity", title="before and after")
    for name, (step, loss) in (("before", losses[0]), ("after", losses[-1])):
        table.add_row(name, str(step), f"{loss:.3f}", f"{math.exp(min(loss, 700)):,.1f}")
    console.print(table)


def print_answers(objective: str, model, tokenizer) -> None:
    """What the model makes of a few prompts. It is tiny and hardly trained: expect frequent words, not sense."""
    table = Table("prompt", "answer", title="what it says")
    if objective == "mlm":
        fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
        for prompt in PROMPTS[objective]:
            text = prompt.format(mask=tokenizer.mask_token)
            guesses = fill(text)
            table.add_row(
                plain(text), plain(", ".join(f"{g['token_str'].strip()} ({g['score']:.2f})" for g in guesses))
            )
    elif objective == "clm":
        write = pipeline("text-generation", model=model, tokenizer=tokenizer)
        for prompt in PROMPTS[objective]:
            (answer,) = write(prompt, max_new_tokens=20, do_sample=False, return_full_text=False)
            table.add_row(plain(prompt), plain(answer["generated_text"]))
    else:  # transformers 5 has no pipeline for encoder-decoders
        for prompt in PROMPTS[objective]:
            text = prompt.format(mask="<extra_id_0>")
            ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=20, do_sample=False)
            table.add_row(plain(text), plain(tokenizer.decode(ids[0])))
    console.print(table)


def plain(text: str) -> str:
    """Text that rich shows as it is: a `[MASK]` is no markup."""
    return text.replace("[", r"\[")


def training_step(objective: str, folder: str, dense: bool, length: int) -> Callable[[], None]:
    """Forward and backward of one row of `length` tokens, with the folder's model or the same one with dense attention; both
    without attention dropout, for which dense attention would leave its fast kernel."""
    config = AutoConfig.from_pretrained(folder, attention_probs_dropout_prob=0.0)
    if dense:
        fields = config.to_dict()
        for key in ("model_type", "transformers_version", "architectures"):
            fields.pop(key, None)
        config = XFormerConfig(**{**fields, "attention": "dense"})
    model = AUTO_CLASS[objective].from_config(config).train()
    ids = torch.randint(0, config.vocab_size, (1, length))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def print_costs(objective: str, folder: Path, length: int) -> None:
    """Time and memory of a training step beside dense attention's, measured here and now."""
    kind = AutoConfig.from_pretrained(folder).attention.type
    if kind == "dense":
        return
    with console.status(f"measuring a training step on {length:,} tokens, with {kind} and with dense attention ..."):
        names = {kind: False, "dense": True}
        steps = {name: training_step(objective, str(folder), dense, length) for name, dense in names.items()}
        seconds = {name: statistics.median(runs) for name, runs in interleaved_seconds(steps, rounds=5).items()}
        memory = {
            name: memory_in_fresh_process(training_step, objective, str(folder), dense, length, repeats=1)
            for name, dense in names.items()
        }
    table = Table("attention", "seconds", "peak MiB", title=f"a training step on one row of {length:,} tokens")
    for name in names:
        table.add_row(name, f"{seconds[name]:.2f}", f"{memory[name] / 2**20:,.0f}")
    faster, smaller = seconds["dense"] / seconds[kind], memory["dense"] / memory[kind]
    table.add_row("dense / " + kind, f"{faster:.1f} times", f"{smaller:.1f} times")
    console.print(table)


def print_places(folder: Path) -> None:
    table = Table("file", "KiB", title=f"where things are: {folder}")
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        table.add_row(path.name, f"{path.stat().st_size / 1024:,.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
