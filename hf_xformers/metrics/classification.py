"""Accuracy, F1 and Matthews correlation of class ids, as scikit-learn defines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Share of equal entries."""
    return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def confusion(predictions: Sequence[int], references: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(counts [classes, classes], true class by predicted class; the sorted classes that occur on either side)."""
    predicted, true = np.asarray(predictions), np.asarray(references)
    classes, ids = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
    np.add.at(counts, (ids[: len(true)], ids[len(true) :]), 1)
    return counts, classes


def f1(
    predictions: Sequence[int], references: Sequence[int], average: str = "binary", pos_label: Any = 1
) -> dict[str, float]:
    """2 tp / (2 tp + fp + fn).

    average: `binary`, of class `pos_label`; `macro`, the mean over classes that occur; `micro`, of the summed counts.
    A class that is neither predicted nor true has 0.
    """
    if average not in ("binary", "macro", "micro"):
        raise ValueError(f"average={average!r} is unknown; take binary, macro or micro")
    counts, classes = confusion(predictions, references)
    right = counts.diagonal().astype(float)
    doubled = (counts.sum(0) + counts.sum(1)).astype(float)  # 2 tp + fp + fn
    if average == "micro":
        return {"f1": float(2 * right.sum() / doubled.sum())}
    scores = np.divide(2 * right, doubled, out=np.zeros_like(right), where=doubled > 0)
    if average == "macro":
        return {"f1": float(scores.mean())}
    return {"f1": float(scores[classes == pos_label].sum())}


def matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Matthews correlation for any number of classes (Gorodkin 2004); 0 where one side is constant."""
    counts, _ = confusion(predictions, references)
    counts = counts.astype(float)
    true, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.trace() * total - true @ predicted
    spread = (total**2 - predicted @ predicted) * (total**2 - true @ true)
    return {"matthews_correlation": float(covariance / np.sqrt(spread)) if spread > 0 else 0.0}
