# SPDX-License-Identifier: Apache-2.0
"""Which sentences of a document say what its summary says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def greedy_oracle(sentences: Sequence[str], summary: str, most: int | None = None) -> list[int]:
    """Indices, in order, of the sentences that together have the best sum of ROUGE-1 and ROUGE-2 F1 with a summary,
    chosen one by one as long as the sum grows (Nallapati et al. 2017, arXiv 1611.04230, section 3.3).

    Bigrams are those within sentences. most: how many are chosen at most. Of equal sentences the first is chosen.
    """
    from rouge_score.tokenize import tokenize

    gold = [_grams(tokenize(summary, None), n) for n in (1, 2)]
    grams = [[_grams(tokenize(sentence, None), n) for n in (1, 2)] for sentence in sentences]
    chosen: list[int] = []
    so_far, best = [Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()], 0.0
    while most is None or len(chosen) < most:
        scores = [
            -1.0 if index in chosen else sum(_score(a + b, c) for a, b, c in zip(so_far, own, gold))
            for index, own in enumerate(grams)
        ]
        if not scores or max(scores) <= best:
            break
        best = max(scores)
        chosen.append(scores.index(best))
        so_far = [a + b for a, b in zip(so_far, grams[chosen[-1]])]
    return sorted(chosen)


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _score(ours: Counter, theirs: Counter) -> float:
    return 2.0 * (ours & theirs).total() / max(1, ours.total() + theirs.total())
