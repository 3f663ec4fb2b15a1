# SPDX-License-Identifier: Apache-2.0
"""What a classifier that exits early is worth at each setting of its rule: accuracy, depth and time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..configuration_xformer import XFormerConfig

if TYPE_CHECKING:
    from .tasks import Encoded, Task


def has_exit_curve(config: Any, task: Task) -> bool:
    """Whether the rows of a task leave a model of this configuration early."""
    return (
        isinstance(config, XFormerConfig)
        and task.id == "text-classification"
        and config.stack.exits == "texts"
        and config.num_hidden_layers > 1
    )


@torch.no_grad()
def exit_curve(trainer: Any, split: Encoded, task: Task) -> list[dict[str, float]]:
    """For each setting of the stack's rule, all layers first: the `setting`, the split's `accuracy`, `layers`, the
    mean number of layers that a row passes, and `saved`, the share of the first setting's time that it spares.

    Times are those of one pass with the batches of evaluation, after one batch that is not counted; on a machine that
    does other work besides they are rough. The settings of the model stay as they were.
    """
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    spec = model.config.stack
    batches = [trainer._prepare_inputs(batch) for batch in trainer.get_test_dataloader(split.features)]
    found: list[dict[str, float]] = []
    for field, values in spec.settings(model.config).items():
        before = getattr(spec, field)
        try:
            for value in values:
                setattr(spec, field, value)
                found.append({"setting": float(value), **_measured(model, batches)})
        finally:
            setattr(spec, field, before)
    whole = found[0]["seconds"] if found else 0.0
    for row in found:
        row["saved"] = round(1 - row.pop("seconds") / max(whole, 1e-9), 4)
    return found


def _measured(model: Any, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    right = layers = rows = 0.0
    seconds = 0.0
    for number, batch in enumerate([batches[0], *batches]):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        _wait(model)
        begun = time.perf_counter()
        output = model(**inputs)
        _wait(model)
        if not number:  # memory and caches warm up
            continue
        seconds += time.perf_counter() - begun
        right += (output.logits.argmax(-1) == batch["labels"]).sum().item()
        layers += output.exit_layers.sum().item()
        rows += len(output.logits)
    return {"accuracy": right / rows, "layers": layers / rows, "seconds": seconds}


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def exit_lines(curve: Sequence[Mapping[str, float]]) -> list[str]:
    """The curve as lines of a table."""
    lines = ["setting   accuracy   mean layers   time saved"]
    for row in curve:
        lines.append(f"{row['setting']:7.4g}   {row['accuracy']:8.1%}   {row['layers']:11.2f}   {row['saved']:10.0%}")
    return lines
