# SPDX-License-Identifier: Apache-2.0
"""A linear probe: what can be read off features without training the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .features import Extraction, read_features
from .tasks.base import is_hidden, label_name

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


def learned_mix(
    states: Tensor, labels: Tensor, classes: int, l2: float = 1e-3, start: Sequence[float] = ()
) -> tuple[Tensor, nn.Linear]:
    """(scores s [L], the probe) of a mix sum_l softmax(s)_l h^l of states [N, L, D], learned together: the probe's
    loss on the mix with mean 0 and variance 1, and l2 / 2 times the squared scores, which pull to the mean of all
    (Peters et al. 2018, arXiv 1802.05365, section 3.2). gamma of that paper's equation 1 is the scale of the mix,
    which the variance takes away."""
    wide = states.double()
    scores = torch.zeros(states.shape[1], dtype=torch.float64)
    if len(start):
        scores.copy_(torch.tensor(list(start), dtype=torch.float64))
    scores.requires_grad_()
    layer = nn.Linear(states.shape[2], classes).double()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(
        [scores, *layer.parameters()], max_iter=MAX_STEPS, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        mixed = mixed_states(wide, scores)
        mixed = (mixed - mixed.mean(0)) / mixed.std(0).clamp(min=1e-6)
        squares = layer.weight.square().sum() + scores.square().sum()
        loss = nn.functional.cross_entropy(layer(mixed), labels) + 0.5 * l2 * squares
        loss.backward()
        return loss

    optimizer.step(closure)
    return scores.detach(), layer.requires_grad_(False)


def mixed_states(states: Tensor, scores: Tensor) -> Tensor:
    """[N, L, D] -> [N, D]: the sum of softmax(s)_l h^l."""
    return torch.einsum("l,nld->nd", scores.softmax(0).to(states.dtype), states)


def probe(made: Extraction) -> dict[str, Any]:
    """By split the accuracy of each column's probe, and `baseline`, that of the training rows' most frequent label; a
    test split that keeps its labels back is left out.

    Raises ValueError for rows without labels and for a single label.
    """
    column, folder = str(made.options.probe), Path(made.options.output).expanduser()
    splits = {split: rows for split, rows in made.splits.items() if split != "test" or not is_hidden(rows[column])}
    names = {split: _labels(rows, column, split) for split, rows in splits.items()}
    known = sorted(set(names["train"]))
    if len(known) < 2:
        raise ValueError(f"--probe {column}: the training rows have the one label {known[0]!r}; two are needed")
    ids = {name: index for index, name in enumerate(known)}
    most = Counter(names["train"]).most_common(1)[0][0]
    tables = {split: dict(_table(folder, split)) for split in splits}
    figures: dict[str, Any] = {"label": column, "classes": len(known), "baseline_rule": f"always {most!r}"}
    targets = torch.tensor([ids[name] for name in names["train"]])
    if made.options.learn_mix:
        figures["mix"] = _learn_mix(made, tables, targets, len(known))
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
        figures[split] = {"accuracy": right, "baseline": sum(name == most for name in truth) / len(truth)}
    return figures


def _learn_mix(
    made: Extraction, tables: dict[str, dict[str, Tensor]], targets: Tensor, classes: int
) -> dict[str, Any]:
    """The scores of the mix and their softmax; the mix becomes a column of every split."""
    columns = list(made.reader.choice.columns)
    stacked = {split: torch.stack([table[name] for name in columns], dim=1) for split, table in tables.items()}
    start = made.options.mix_scores
    scores, _ = learned_mix(stacked["train"], targets, classes, made.options.probe_l2, start)
    for split, table in tables.items():
        table["mix"] = mixed_states(stacked[split], scores)
    return {
        "scores": [round(value, 6) for value in scores.tolist()],
        "weights": [round(value, 6) for value in scores.softmax(0).tolist()],
    }


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


__all__: Sequence[str] = ["learned_mix", "linear_probe", "mixed_states", "probe"]
