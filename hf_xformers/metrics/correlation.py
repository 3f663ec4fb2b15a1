"""Metrics of regression: Pearson, Spearman, mean squared error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean_squared_error(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    difference = np.asarray(predictions, dtype=float) - np.asarray(references, dtype=float)
    return {"mse": float(np.mean(difference**2))}


def pearson(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Pearson correlation; 0 where one side is constant."""
    return {"pearsonr": _correlation(np.asarray(predictions, dtype=float), np.asarray(references, dtype=float))}


def spearman(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Pearson correlation of ranks; entries that are equal share the mean of their ranks."""
    return {"spearmanr": _correlation(_ranks(predictions), _ranks(references))}


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = np.linalg.norm(x) * np.linalg.norm(y)
    # What is left of a constant after its mean is rounding, of the size of the machine precision.
    return float(np.clip(x @ y / size, -1.0, 1.0)) if size > 0 else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
