"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum (Lin 2004), F1 in percent, as the rouge-score package computes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_WORD = re.compile(r"[a-z0-9]+")


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Means over the texts. Words are runs of a-z and 0-9 after lower-casing; sentences (for Lsum) are lines."""
    sums = dict.fromkeys(KEYS, 0.0)
    for guess, gold in zip(predictions, references):
        ours, theirs = _words(guess), _words(gold)
        sums["rouge1"] += _overlap(ours, theirs, 1)
        sums["rouge2"] += _overlap(ours, theirs, 2)
        common = int(_lengths(theirs, ours)[-1, -1])
        sums["rougeL"] += _f1(common, len(ours), len(theirs))
        sums["rougeLsum"] += _of_lines(guess, gold)
    return {key: 100.0 * value / len(predictions) for key, value in sums.items()}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _f1(common: float, ours: int, theirs: int) -> float:
    return 2.0 * common / (ours + theirs) if common else 0.0


def _overlap(ours: Sequence[str], theirs: Sequence[str], n: int) -> float:
    a, b = (Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for words in (ours, theirs))
    return _f1(sum((a & b).values()), sum(a.values()), sum(b.values()))


def _lengths(gold: Sequence[str], guess: Sequence[str]) -> np.ndarray:
    """[len(gold) + 1, len(guess) + 1]: length of the longest common subsequence of the first i and the first j
    words."""
    table = np.zeros((len(gold) + 1, len(guess) + 1), dtype=np.int32)
    other = np.asarray(guess, dtype=object)
    for i, word in enumerate(gold):
        # A row is the running maximum of what the row above allows; a match may add one to the entry before it.
        step = np.where(other == word, table[i, :-1] + 1, table[i, 1:]) if len(other) else table[i, 1:]
        table[i + 1, 1:] = np.maximum.accumulate(step)
    return table


def _common_positions(gold: Sequence[str], guess: Sequence[str]) -> set[int]:
    """Positions in `gold` of a longest common subsequence; of several the one that the package's walk back finds."""
    table = _lengths(gold, guess)
    i, j = len(gold), len(guess)
    positions = set()
    while i and j:
        if gold[i - 1] == guess[j - 1]:
            i, j = i - 1, j - 1
            positions.add(i)
        elif table[i, j - 1] > table[i - 1, j]:
            j -= 1
        else:
            i -= 1
    return positions


def _of_lines(guess: str, gold: str) -> float:
    """Each true line is covered by the union of what it shares with every predicted line; no word counts twice."""
    ours = [words for line in guess.split("\n") if (words := _words(line))]
    theirs = [words for line in gold.split("\n") if (words := _words(line))]
    left_ours = Counter(word for words in ours for word in words)
    left_theirs = Counter(word for words in theirs for word in words)
    lengths = left_ours.total(), left_theirs.total()
    hits = 0
    for words in theirs:
        positions = set().union(*(_common_positions(words, line) for line in ours)) if ours else set()
        for word in (words[position] for position in sorted(positions)):
            if left_ours[word] > 0 and left_theirs[word] > 0:
                hits += 1
                left_ours[word] -= 1
                left_theirs[word] -= 1
    return _f1(hits, *lengths)
