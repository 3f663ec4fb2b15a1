"""Corpus BLEU (Papineni et al. 2002) on detokenised text, with the tokens and the smoothing of sacreBLEU (Post
2018)."""

from __future__ import annotations

import html
import math
import re
import string
from collections import Counter
from collections.abc import Sequence

ORDERS = 4
# The "13a" rules of the WMT scorer: every mark of ASCII stands alone but the apostrophe; point and comma stay within
# numbers, and a hyphen parts only from a digit before it.
_ALONE = re.compile("([" + re.escape("".join(c for c in string.punctuation if c not in "',-.")) + "])")
_AFTER_OTHER = re.compile(r"([^0-9])([.,])")
_BEFORE_OTHER = re.compile(r"([.,])([^0-9])")
_AFTER_DIGIT = re.compile(r"([0-9])(-)")
_ENTITIES = ("&quot;", "&amp;", "&lt;", "&gt;")


def tokenize_13a(text: str) -> list[str]:
    """The tokens of a text as the WMT scorer mteval-v13a cuts it."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity in _ENTITIES:
        text = text.replace(entity, html.unescape(entity))
    text = _ALONE.sub(r" \1 ", f" {text} ")
    text = _AFTER_OTHER.sub(r"\1 \2 ", text)
    text = _BEFORE_OTHER.sub(r" \1 \2", text)
    return _AFTER_DIGIT.sub(r"\1 \2 ", text).split()


def corpus_bleu(predictions: Sequence[str], references: Sequence[str], lowercase: bool = False) -> dict[str, float]:
    """`bleu`, 0 to 100, of one reference per prediction; signature `nrefs:1|case:mixed|tok:13a|smooth:exp`.

    An order without a match counts as half, a quarter, ... of a match (exponential smoothing). Orders for which the
    corpus has no n-gram at all leave their precision at 0, and so the score.
    """
    right, total = [0] * ORDERS, [0] * ORDERS
    length = true_length = 0
    for guess, gold in zip(predictions, references):
        ours, theirs = (tokenize_13a((t.lower() if lowercase else t).rstrip()) for t in (guess, gold))
        length, true_length = length + len(ours), true_length + len(theirs)
        for n in range(1, ORDERS + 1):
            counts = _ngrams(ours, n)
            right[n - 1] += sum((counts & _ngrams(theirs, n)).values())
            total[n - 1] += sum(counts.values())
    if not any(right) or not all(total):
        return {"bleu": 0.0}
    logarithms, missing = 0.0, 1.0
    for matched, count in zip(right, total):
        if not matched:
            missing *= 2
        logarithms += math.log((matched or 1.0 / missing) / count)
    brevity = min(0.0, 1.0 - true_length / length)
    return {"bleu": 100.0 * math.exp(brevity + logarithms / ORDERS)}


def _ngrams(tokens: Sequence[str], n: int) -> Counter:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
