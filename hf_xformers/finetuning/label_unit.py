# SPDX-License-Identifier: Apache-2.0
"""Regression whatever the unit of its labels: the last layer begins at their mean and learns in steps of their spread.

It is as if labels were shifted and divided to mean 0 and variance 1, but weights, and so all that is saved of a run,
answer in the labels' own unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn


def unit_of(labels: Iterable[float]) -> tuple[float, float]:
    """(mean, standard deviation) of labels; the latter is 1 where they are all alike."""
    values = np.asarray(list(labels), dtype=np.float64)
    spread = float(values.std())
    return float(values.mean()), spread if spread > 1e-9 * max(1.0, float(np.abs(values).max())) else 1.0


def answering_layers(model: Any) -> list[nn.Linear]:
    """The layers of a model, or of one in an adapter, that end in the one number of a regression."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    base = f"{plain.base_model_prefix}."
    return [part for name, part in plain.named_modules()
            if isinstance(part, nn.Linear) and part.out_features == 1 and not name.startswith(base)]  # fmt: skip


@torch.no_grad()
def begin_in_unit(model: Any, mean: float, spread: float) -> None:
    """Turns fresh last layers, which answer around 0, into ones that answer around the mean."""
    if (mean, spread) == (0.0, 1.0):  # also of tasks that answer with no number
        return
    for layer in answering_layers(model):
        layer.weight.mul_(spread)
        if layer.bias is not None:
            layer.bias.mul_(spread).add_(mean)


def learn_in_unit(optimizer: torch.optim.Optimizer, model: Any, spread: float) -> None:
    """Gives the last layers of a fresh optimizer `spread` times the rate, and the decay that they had at the plain
    one: what Adam and its kin do to layers that are smaller by that factor. These groups come last."""
    if spread == 1:
        return
    own = {id(parameter) for layer in answering_layers(model) for parameter in layer.parameters()}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in own]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
            changed = {"lr": group["lr"] * spread, "weight_decay": group.get("weight_decay", 0.0) / spread}
            optimizer.param_groups.append({**group, "params": moved, **changed})
