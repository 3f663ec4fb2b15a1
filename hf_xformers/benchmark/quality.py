# SPDX-License-Identifier: Apache-2.0
"""What a mechanism learns: a small model trained on a task, with its held-out loss and accuracy over time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import CACHE
from ..training.evaluation import summarise, token_statistics
from .entries import SHAPES, Entry, make_config
from .measure import state_tensors
from .tasks import TASKS, SpecialIds, chance, head_for, inputs_for, read_task


@dataclass(frozen=True)
class Training:
    """Settings of a training run. Steps of `batch_size` new rows each; AdamW; the learning rate rises over a tenth of
    the steps and falls to zero over the last fifth. evaluations: how often held-out rows are scored, evenly."""

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 2e-3
    length: int = 32
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    held_out: int = 256
    evaluations: int = 10
    seed: int = 0


def build(entry: Entry, shape: str, task_name: str, training: Training) -> tuple[nn.Module, str]:
    """A model for a task, and the name of its head. The same seed gives the same start."""
    from ..variants import family

    task = TASKS[task_name]
    special = SpecialIds.of(task)
    head = head_for(task, SHAPES[shape].head, entry.config_class.heads)
    fields: dict[str, Any] = {
        "vocab_size": special.vocab_size,
        "hidden_size": training.hidden_size,
        "num_hidden_layers": training.layers,
        "num_attention_heads": training.heads,
        "intermediate_size": 4 * training.hidden_size,
        "pad_token_id": special.pad,
        # 0.02 suits wide models: with narrow ones scores start so small that attention learns nothing for long.
        "initializer_range": training.hidden_size**-0.5,
    }
    if shape == "seq2seq":
        fields["decoder_start_token_id"] = special.begin
    config: Any = make_config(entry, shape, training.length + 3, **fields)
    if head == "ForSequenceClassification":
        config.num_labels = task.classes
    config.use_cache = False
    torch.manual_seed(training.seed)
    return family(entry.variant)[head](config), head


def train_on(
    entry: Entry, shape: str, task_name: str, training: Training, data: str | Path, device: str = "cpu"
) -> dict[str, Any]:
    """Trains a model on the rows in `data` ([`write_task`][hf_xformers.benchmark.tasks.write_task]).

    Returns `head`, `parameters`, held-out `loss` (nats per answer) and `accuracy`, their `chance` levels, `seconds` of
    training (processor seconds on one thread, else wall), `curve`: [step, seconds, loss, accuracy] over time, and the
    `state size` of a causal model ([`state_size`]).
    """
    task, parts = TASKS[task_name], read_task(Path(data))
    model, head = build(entry, shape, task_name, training)
    model.to(device)
    rows = {
        part: {
            name: torch.from_numpy(column).to(device)
            for name, column in inputs_for(task, parts[part], head, training.seed + offset).items()
        }
        for offset, part in enumerate(("train", "held_out"))
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, training.steps))
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    every = max(training.steps // max(training.evaluations, 1), 1)
    curve: list[list[float]] = []
    spent = 0.0
    for step in range(training.steps + 1):
        if step % every == 0 or step == training.steps:
            scores = evaluate(model, rows["held_out"], head, training.batch_size)
            curve.append([step, spent, scores["loss"], scores["accuracy"]])
        if step == training.steps:
            break
        start = clock()
        model.train()
        batch = _batch(rows["train"], step * training.batch_size, training.batch_size)
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        spent += clock() - start
    level = chance(task, parts)
    return {
        "head": head,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": training.steps,
        "loss": curve[-1][2],
        "accuracy": curve[-1][3],
        "chance loss": level["loss"],
        "chance accuracy": level["accuracy"],
        "seconds": spent,
        "curve": curve,
        "state size": state_size(model, rows["held_out"]["input_ids"][:1]) if head == "ForCausalLM" else None,
    }


@torch.no_grad()
def state_size(model: Any, ids: Tensor) -> int:
    """Numbers that generation keeps of one row [1, T] after reading it."""
    output = model.eval()(input_ids=ids, use_cache=True)
    return sum(tensor.numel() for tensor in state_tensors(getattr(output, CACHE)))


def _rate(step: int, steps: int) -> float:
    """Up over a tenth of the steps, then full, then down over the last fifth: what is learnt all at once, after a long
    plateau, needs the full rate until it happens."""
    return min((step + 1) / max(steps / 10, 1), (steps - step) / max(steps / 5, 1), 1.0)


def _batch(rows: dict[str, Tensor], start: int, size: int) -> dict[str, Tensor]:
    """The next rows; short of rows, the first ones again. Columns that are padding in all of them are left out."""
    count = len(rows["labels"])
    index = torch.arange(start, start + size, device=rows["labels"].device) % count
    batch = {name: column[index] for name, column in rows.items()}
    if "attention_mask" in batch:
        longest = int(batch["attention_mask"].sum(-1).max())
        batch = {name: column[:, :longest] if column.ndim == 2 else column for name, column in batch.items()}
    return batch


@torch.no_grad()
def evaluate(model: Any, rows: dict[str, Tensor], head: str, batch_size: int) -> dict[str, float]:
    """Loss (nats per answer) and accuracy over all answers."""
    model.eval()
    found = []
    for start in range(0, len(rows["labels"]), batch_size):
        batch = {name: column[start : start + batch_size] for name, column in rows.items()}
        logits, labels = model(**batch).logits, batch["labels"]
        if head == "ForSequenceClassification":
            logits, labels = logits[:, None], labels[:, None]
        found.append(token_statistics(logits, labels, next_token=head == "ForCausalLM").cpu())
    return summarise(torch.cat(found))
