"""Runs of the command that take a second or two: a small text, a tiny model, few steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

from safetensors.torch import load_file

import hf_xformers.cli

SHAPE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 360,
}
CLOCK = ("runtime", "per_second")  # parts of names of figures that no two runs share


def write_text(path: Path, lines: int = 120, seed: int = 0) -> Path:
    """Lines of words that follow each other in a pattern, so that there is something to learn."""
    draw = random.Random(seed)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "tu") for b in ("ran", "sel", "tor", "vin")]
    texts = []
    for _ in range(lines):
        start = draw.randrange(len(words))
        texts.append(" ".join(words[(start + 3 * step) % len(words)] for step in range(draw.randint(4, 16))))
    path.write_text("\n".join(texts) + "\n")
    return path


def flags(**options) -> list[str]:
    """Options as a command line; True stands for a flag without a value, None leaves an option out."""
    tokens: list[str] = []
    for name, value in options.items():
        if value is not None:
            tokens += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tokens


def pretrain_flags(text: Path, output: Path, **options) -> list[str]:
    defaults = {
        **SHAPE,
        "data": text,
        "output_dir": output,
        "block_size": 16,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": "true",
    }
    return flags(**{**defaults, **options})


def pretrain(text: Path, output: Path, *extra: str, **options) -> Path:
    """Runs the command in this process, and fails with it."""
    code = hf_xformers.cli.main(["pretrain", *pretrain_flags(text, output, **options), *extra])
    assert code == 0
    return output


def history(output: Path) -> list[dict]:
    """Trainer's log without what a clock decides, and without the closing row about the process alone."""
    entries = json.loads((output / "trainer_state.json").read_text())["log_history"]
    entries = [entry for entry in entries if "train_loss" not in entry]
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in CLOCK)} for entry in entries
    ]


def weights(output: Path) -> dict:
    return load_file(output / "model.safetensors")


def summary(output: Path) -> dict:
    return json.loads((output / "training_summary.json").read_text())
