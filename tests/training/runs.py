"""Runs of the command that take a second or two: a small text, a tiny model, few steps."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

import hf_xformers.cli
from hf_xformers.cli.pretrain import run

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


def same_run(output: Path, expected: Path) -> None:
    """Bit for bit the same log and weights."""
    assert history(output) == history(expected)
    same_weights(output, expected)


def same_weights(output: Path, expected: Path) -> None:
    mine, theirs = weights(output), weights(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def interrupted_and_resumed(argv: list[str], step: int) -> None:
    """A run that is stopped after a step, between two checkpoints, and goes on from the last one."""

    class Die(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(argv, [Die()])
    assert run([*argv, "--resume_from_checkpoint"]) == 0


def cut_after(step: int, whole: Path, cut: Path, *stages: str) -> Path:
    """A copy of a run as if it had been killed after the checkpoint of a step, before `stages` inside it."""
    shutil.copytree(whole, cut)
    for checkpoint in cut.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    (cut / "model.safetensors").unlink(missing_ok=True)
    for name in stages:
        shutil.rmtree(cut / name)
    return cut


def summary(output: Path) -> dict:
    return json.loads((output / "training_summary.json").read_text())


# ------------------------------------------------------------------------------------------------ without the command


def quiet(folder: Path, **options) -> TrainingArguments:
    """Arguments of a Trainer that only trains."""
    given = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    return TrainingArguments(str(folder), **{**given, **options})


def plain_sgd(folder: Path, **options) -> TrainingArguments:
    """Steps that can be done by hand: SGD at a constant rate, on rows in their order."""
    given = {
        **{"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"logging_steps": 1, "save_strategy": "no"},
        **{"remove_unused_columns": False, "train_sampling_strategy": "sequential"},
    }
    return quiet(folder, **{**given, **options})


def stacked(rows: list[dict]) -> dict:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def same_parameters(model, other, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def step_by_hand(model, loss) -> None:
    """A step of `plain_sgd`."""
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
