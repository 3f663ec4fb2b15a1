# SPDX-License-Identifier: Apache-2.0
"""The account of a linearization: what a trained model's softmax attention became, stage by stage, and what each
gained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.saved_files import read_object, write_json

FILE = "linearization.json"
TITLES = {"transfer": "attention transfer", "distillation": "distillation", "lora": "LoRA"}


@dataclass
class StageRecord:
    """One finished stage.

    Args:
        trained: parameters that could change, of `parameters`.
        what: in words.
        loss: held-out loss after it, nats per predicted token (None: nothing was held out).
        rows: of a step.
        seconds: of training.
    """

    name: str
    steps: int
    learning_rate: float
    trained: int
    parameters: int
    what: str
    seconds: float
    train_loss: float | None = None
    loss: float | None = None
    rows: int | None = None


@dataclass
class Linearization:
    """What was made of which model.

    Args:
        source: folder or Hub id, as it was given.
        attention: the component that was put in.
        layers: which have it.
        plan: the settings, which a resumed run must share.
        source_loss, swapped_loss, baseline_loss: held-out losses of the source, after the swap before any training,
            and of token frequencies alone, on held_out_rows rows.
        layer_errors: by layer, |own - softmax|^2 / |softmax|^2 of its attention's output, after the swap and after the
            transfer.
    """

    source: str
    attention: dict[str, Any]
    layers: list[int]
    plan: dict[str, Any] = field(default_factory=dict)
    status: str = "running"
    source_loss: float | None = None
    swapped_loss: float | None = None
    baseline_loss: float | None = None
    held_out_rows: int | None = None
    layer_errors: dict[str, list[float]] = field(default_factory=dict)
    stages: list[StageRecord] = field(default_factory=list)

    def stage(self, name: str) -> StageRecord | None:
        """The record of a finished stage; None for one that is not finished."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def recovered(self, loss: float | None) -> float | None:
        """The part of the gap between swap and source that a loss closes; None where there is none to speak of."""
        if loss is None or self.source_loss is None or self.swapped_loss is None:
            return None
        gap = self.swapped_loss - self.source_loss
        return (self.swapped_loss - loss) / gap if gap > 1e-3 else None

    def sentences(self) -> list[str]:
        """What happened, for people."""
        layers = f"layer {self.layers[0]}" if len(self.layers) == 1 else f"layers {spans(self.layers)}"
        lines = [f"The attention of {layers} is `{self.attention['type']}` in place of softmax attention."]
        if self.source_loss is not None and self.swapped_loss is not None:
            baseline = "" if self.baseline_loss is None else f"; token frequencies alone give {self.baseline_loss:.3f}"
            rows = "" if self.held_out_rows is None else f" on {self.held_out_rows:,} rows"
            lines.append(
                f"Held-out loss{rows}: {self.source_loss:.3f} of the source, {self.swapped_loss:.3f} after the"
                f" swap{baseline}."
            )
        for stage in self.stages:
            rows = "" if stage.rows is None else f" of {stage.rows:,} row{'s' if stage.rows > 1 else ''}"
            text = (
                f"{TITLES[stage.name].capitalize() if stage.name != 'lora' else 'LoRA'}: {stage.steps:,} steps{rows},"
                f" learning rate {stage.learning_rate:g}, in {stage.seconds:.0f} s trained {stage.what},"
                f" {stage.trained:,} of {stage.parameters:,} parameters"
            )
            if stage.loss is not None:
                part = self.recovered(stage.loss)
                share = "" if part is None else f", {part:.1%} of the gap between swap and source recovered"
                text += f"; held-out loss {stage.loss:.3f}{share}"
            lines.append(f"{text}.")
        if any((self.recovered(stage.loss) or 0) > 1 for stage in self.stages):
            lines.append(
                "More than the whole gap: the training text resembles the held-out text, so that the model has also"
                " adapted to it, which the source has not."
            )
        before, after = self.layer_errors.get("swapped"), self.layer_errors.get("transfer")
        if before and after:
            pairs = ", ".join(f"{layer}: {a:.2g} -> {b:.2g}" for layer, a, b in zip(self.layers, before, after))
            lines.append(f"Relative error of each layer's attention before and after the transfer: {pairs}.")
        return lines

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, dataclasses.asdict(self))


def spans(numbers: list[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_linearization(folder: str | Path) -> Linearization | None:
    """What a folder says; None for one that says nothing. Raises `ValueError` for a file that is damaged."""
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        return None
    content = read_object(path)
    if "floor_loss" in content:  # the name in 0.1.0
        content["baseline_loss"] = content.pop("floor_loss")
    try:
        stages = [StageRecord(**entry) for entry in content.pop("stages")]
        return Linearization(**content, stages=stages)
    except (TypeError, KeyError):
        raise ValueError(f"{str(path)!r} is no account of a linearization; remove it, or copy it again") from None
