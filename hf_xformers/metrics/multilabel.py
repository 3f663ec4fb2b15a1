"""Accuracy and F1 of rows with any number of labels, as scikit-learn defines them for indicator matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def multilabel_accuracy(predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of rows of the 0/1 matrices [N, labels] that are equal in every label (subset accuracy)."""
    return {"accuracy": float((np.asarray(predictions) == np.asarray(references)).all(-1).mean())}


def multilabel_f1(
    predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]], average: str
) -> dict[str, float]:
    """2 tp / (2 tp + fp + fn) of 0/1 matrices [N, labels].

    average: `micro`, of the counts of all labels; `macro`, the mean over labels, 0 for one that is neither predicted
    nor true. Raises ValueError for another.
    """
    if average not in ("macro", "micro"):
        raise ValueError(f"average={average!r} is unknown; take macro or micro")
    guess, gold = np.asarray(predictions, dtype=bool), np.asarray(references, dtype=bool)
    right = (guess & gold).sum(0).astype(float)
    doubled = (guess.sum(0) + gold.sum(0)).astype(float)  # 2 tp + fp + fn
    if average == "micro":
        right, doubled = right.sum(keepdims=True), doubled.sum(keepdims=True)
    return {"f1": float(np.divide(2 * right, doubled, out=np.zeros_like(right), where=doubled > 0).mean())}
