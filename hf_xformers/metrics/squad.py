# SPDX-License-Identifier: Apache-2.0
"""Exact match and token F1 of answers (Rajpurkar et al. 2016, section 6.1; 2018 for questions without an answer)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def squad(
    predictions: Sequence[str], references: Sequence[Sequence[str]], no_answer: bool = False
) -> dict[str, float]:
    """`exact_match` and `f1` in percent: per question the best over its true answers, then the mean.

    references: for each question its true answers. no_answer: SQuAD 2's rules, by which a question may have no answer
    (an empty list), which the empty prediction alone meets; without it two texts of no words share none.
    """
    exact = overlap = 0.0
    for guess, answers in zip(predictions, references):
        golds = list(answers)
        if no_answer:
            golds = [text for text in golds if normalize_answer(text)] or [""]
        exact += max((float(normalize_answer(guess) == normalize_answer(gold)) for gold in golds), default=0.0)
        overlap += max((_token_f1(guess, gold, no_answer) for gold in golds), default=0.0)
    return {"exact_match": 100.0 * exact / len(predictions), "f1": 100.0 * overlap / len(predictions)}


def _token_f1(guess: str, gold: str, no_answer: bool) -> float:
    ours, theirs = normalize_answer(guess).split(), normalize_answer(gold).split()
    if no_answer and not (ours and theirs):
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2.0 * common / (len(ours) + len(theirs)) if common else 0.0
