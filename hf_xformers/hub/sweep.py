# SPDX-License-Identifier: Apache-2.0
"""What a sweep over widths, learning rates and seeds says: each entry at each width with the rate that suits it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

SWEEP = ("task", "label", "hidden size", "state size", "accuracy", "lowest", "highest", "learning rate", "runs")


def best_of_sweep(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, label and width: the mean, lowest and highest accuracy over seeds, at the learning rate
    with the highest mean, of so many `runs`; rows that failed are left out."""
    groups: dict[tuple[Any, ...], dict[float, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["status"] == "ok":
            point = row["point"]
            rates = groups.setdefault((row["at"], row["label"], row["shape"], point["hidden_size"]), {})
            rates.setdefault(point["learning_rate"], []).append(row)
    found = []
    for (task, label, shape, width), rates in groups.items():
        means = {rate: statistics.fmean(row["accuracy"] for row in runs) for rate, runs in rates.items()}
        rate = max(means, key=means.__getitem__)
        accuracies = [row["accuracy"] for row in rates[rate]]
        found.append(
            {
                **{"task": task, "label": label, "shape": shape, "hidden size": width, "learning rate": rate},
                **{"accuracy": means[rate], "lowest": min(accuracies), "highest": max(accuracies)},
                **{"state size": rates[rate][0]["state size"], "runs": len(accuracies)},
                "chance accuracy": rates[rate][0]["chance accuracy"],
            }
        )
    return found
