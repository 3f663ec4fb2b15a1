"""Error rates of transcripts: words, or characters, that have to be changed, put in or left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def edit_distance(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The least number of entries to change, put in or leave out that makes `second` of `first` (Levenshtein 1966)."""
    if not len(first) or not len(second):
        return max(len(first), len(second))
    known = {entry: number for number, entry in enumerate(dict.fromkeys(second))}
    target = np.array([known[entry] for entry in second])
    places = np.arange(len(second) + 1)
    row = places.copy()
    for number, entry in enumerate(first, start=1):
        wrong = target != known.get(entry, -1)
        step = np.minimum(row[1:] + 1, row[:-1] + wrong)  # leaving out, changing
        row = np.concatenate([[number], step])
        row = np.minimum.accumulate(row - places) + places  # putting in
    return int(row[-1])


def _rate(predictions: Sequence[Sequence[Any]], references: Sequence[Sequence[Any]]) -> float:
    total = sum(map(len, references))
    errors = sum(edit_distance(given, true) for given, true in zip(predictions, references))
    return errors / total if total else float(errors > 0)


def word_error_rate(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """`wer`: errors of all texts divided by the words of the references; it may be above 1."""
    return {"wer": _rate([text.split() for text in predictions], [text.split() for text in references])}


def character_error_rate(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """`cer`: errors of all texts divided by the characters of the references, with their single spaces."""
    joined = [[" ".join(text.split()) for text in texts] for texts in (predictions, references)]
    return {"cer": _rate(*joined)}
