"""Error rates against a recursion, and by hand."""

import functools
import random

import pytest

from hf_xformers.metrics import character_error_rate, compute, edit_distance, word_error_rate


def by_recursion(first, second):
    @functools.cache
    def least(i, j):
        if not i or not j:
            return i + j
        changed = least(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(changed, least(i - 1, j) + 1, least(i, j - 1) + 1)

    return least(len(first), len(second))


def test_edit_distance():
    draw = random.Random(0)
    for _ in range(200):
        first, second = ("".join(draw.choices("abc", k=draw.randrange(8))) for _ in range(2))
        assert edit_distance(first, second) == by_recursion(first, second)
    assert edit_distance("kitten", "sitting") == 3


def test_rates_are_of_all_texts_together():
    said, true = ["a b c", "", "x"], ["a c", "d e", "x"]
    assert word_error_rate(said, true) == {"wer": pytest.approx(3 / 5)}
    assert character_error_rate(["abc d"], ["abd  d"]) == {"cer": pytest.approx(1 / 5)}
    assert word_error_rate(["a b"], [""]) == {"wer": 1.0} and word_error_rate([""], [""]) == {"wer": 0.0}
    assert compute("wer", said, true, backend="own") == word_error_rate(said, true)


def test_equal_to_the_package_that_defines_them():
    jiwer = pytest.importorskip("jiwer")
    said, true = ["a b c", "d", "x y"], ["a c", "d e", "x"]
    assert word_error_rate(said, true)["wer"] == pytest.approx(jiwer.wer(true, said))
    assert character_error_rate(said, true)["cer"] == pytest.approx(jiwer.cer(true, said))
