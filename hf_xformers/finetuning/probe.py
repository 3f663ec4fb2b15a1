"""A linear probe: what can be read off features without training the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .features import Extraction, read_features
from .tasks.base import label_name

MAX_STEPS = 200


def linear_probe(features: Tensor, labels: Tensor, classes: int, l2: float = 1e-3) -> nn.Linear:
    """Multinomial logistic regression [N, D] -> classes: the mean cross-entropy and l2 / 2 times the squared weights,
    at its minimum (it is convex), in double precision by L-BFGS."""
    layer = nn.Linear(features.shape[1], classes).double()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    wide = features.double()
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=MAX_STEPS, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(layer(wide), labels) + 0.5 * l2 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return layer.requires_grad_(False)


def probe(made: Extraction) -> dict[str, Any]:
    """By split the accuracy of each column's probe, and `floor`, that of the training rows' most frequent label.

    Raises ValueError for rows without labels and for a single label.
    """
    column, folder = str(made.options.probe), Path(made.options.output).expanduser()
    names = {split: _labels(made.splits[split], column, split) for split in made.splits}
    known = sorted(set(names["train"]))
    if len(known) < 2:
        raise ValueError(f"--probe {column}: the training rows have the one label {known[0]!r}; two are needed")
    ids = {name: index for index, name in enumerate(known)}
    most = Counter(names["train"]).most_common(1)[0][0]
    tables = {split: _table(folder, split) for split in made.splits}
    figures: dict[str, Any] = {"label": column, "classes": len(known), "floor_rule": f"always {most!r}"}
    targets = torch.tensor([ids[name] for name in names["train"]])
    fitted = {}
    for layer, values in tables["train"].items():
        mean, scale = values.mean(0), values.std(0).clamp(min=1e-6)
        linear = linear_probe((values - mean) / scale, targets, len(known), made.options.probe_l2)
        fitted[layer] = (mean, scale, linear)
    for split, table in tables.items():
        truth = names[split]
        right: dict[str, float] = {}
        for layer, (mean, scale, linear) in fitted.items():
            chosen = linear(((table[layer] - mean) / scale).double()).argmax(-1).tolist()
            right[layer] = sum(known[guess] == name for guess, name in zip(chosen, truth)) / len(truth)
        figures[split] = {"accuracy": right, "floor": sum(name == most for name in truth) / len(truth)}
    return figures


def _labels(rows: Any, column: str, split: str) -> list[str]:
    from .origin import RowNames

    declared = getattr(rows.features[column], "names", None)
    where = RowNames(rows, split)
    return [label_name(value, declared, "probe", where, row) for row, value in enumerate(rows[column])]


def _table(folder: Path, split: str) -> Mapping[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for entry in read_features(folder, split):
        for name, value in entry.items():
            if name != "row":
                found.setdefault(name, []).append(value.float())
    return {name: torch.stack(values) for name, values in found.items()}


__all__: Sequence[str] = ["linear_probe", "probe"]
