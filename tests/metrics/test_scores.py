"""Figures by hand: which side is which, under which name, in which unit, and what is undefined."""

import subprocess
import sys

import numpy as np
import pytest

from hf_xformers.metrics import METRICS, compute, require_packages, scores


def approx(**figures):
    return {name: pytest.approx(value, abs=1e-9) for name, value in figures.items()}


def test_classes():
    gold, guess = [1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [0] * 3 + [1]  # tp 6, fn 2, tn 3, fp 1
    assert compute("accuracy", guess, gold) == approx(accuracy=9 / 12)
    assert compute("f1", guess, gold) == approx(f1=12 / 15)
    assert compute("f1", guess, gold, average="macro") == approx(f1=(12 / 15 + 6 / 9) / 2)
    assert compute("f1", guess, gold, average="micro") == approx(f1=9 / 12)
    assert compute("matthews_correlation", guess, gold) == approx(
        matthews_correlation=(18 - 2) / (7 * 8 * 4 * 5) ** 0.5
    )
    # of three classes, one is predicted alone
    assert compute("f1", [0, 1, 2], [0, 1, 1], average="macro") == approx(f1=(1 + 2 / 3 + 0) / 3)


def test_any_number_of_labels():
    gold = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]]
    guess = [[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert compute("multilabel_accuracy", guess, gold) == approx(accuracy=2 / 4)
    assert compute("multilabel_f1", guess, gold, average="micro") == approx(f1=2 * 3 / (4 + 4))
    assert compute("multilabel_f1", guess, gold, average="macro") == approx(f1=(2 * 2 / 5 + 2 / 3 + 0) / 3)
    alone = [[row[0]] for row in guess], [[row[0]] for row in gold]  # a matrix of one label
    assert compute("multilabel_accuracy", *alone) == approx(accuracy=3 / 4)
    for average in ("micro", "macro"):
        assert compute("multilabel_f1", *alone, average=average) == approx(f1=2 * 2 / 5)


def test_numbers():
    gold, guess = np.array([0.0, 1.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0, 2.0])
    x, y = guess - guess.mean(), gold - gold.mean()
    assert compute("pearsonr", guess, gold) == approx(pearsonr=x @ y / (x @ x * (y @ y)) ** 0.5)
    x, y = np.array([1.5, 1.5, 4, 3]) - 2.5, np.array([1, 2, 3, 4]) - 2.5  # ranks; equal entries share theirs
    assert compute("spearmanr", guess, gold) == approx(spearmanr=x @ y / (x @ x * (y @ y)) ** 0.5)
    assert compute("mse", guess, gold) == approx(mse=(1 + 0 + 1 + 4) / 4)


def test_entities():
    gold = [["B-A", "I-A", "O", "B-B"], ["O", "O"]]
    guess = [["B-A", "I-A", "O", "B-A"], ["B-B", "O"]]
    assert compute("seqeval", guess, gold) == approx(
        overall_precision=1 / 3, overall_recall=1 / 2, overall_f1=2 / 5, overall_accuracy=4 / 6
    )
    # ill-formed tags are read as conlleval does: a type that changes begins an entity
    assert compute("seqeval", [["I-A", "I-B"]], [["B-A", "B-B"]])["overall_f1"] == 1.0
    bilou = compute("seqeval", [["B-A", "L-A", "U-A", "O"]], [["B-A", "L-A", "U-A", "U-A"]])
    assert bilou == approx(overall_precision=1, overall_recall=2 / 3, overall_f1=4 / 5, overall_accuracy=3 / 4)
    with pytest.raises(ValueError):
        compute("seqeval", [["O", "O"]], [["O"]])


def test_bleu():
    # precisions 1, 2/3, 1/2 and, smoothed, 1/2 of 1/1; the lengths are equal
    expected = 100 * (3 / 4 * 1 / 3 * (1 / 2) / 2 * (1 / 4) / 1) ** 0.25
    assert compute("sacrebleu", ["a b c x"], ["a b y c"]) == approx(bleu=expected)
    # what is too short pays for it: exp(1 - 8 / 4)
    assert compute("sacrebleu", ["a b c d"], ["a b c d e f g h"]) == approx(bleu=100 * np.exp(-1))
    assert compute("sacrebleu", ["A b c d"], ["a b c d"], lowercase=True) == approx(bleu=100)


def test_rouge():
    assert compute("rouge", ["the cat sat", ""], ["the dog sat down", "x"]) == approx(
        rouge1=100 * 4 / 7 / 2, rouge2=0, rougeL=100 * 4 / 7 / 2, rougeLsum=100 * 4 / 7 / 2
    )
    swapped = compute("rouge", ["b c d\na"], ["a\nb c d"])  # the order of lines counts for L alone
    assert swapped == approx(rouge1=100, rouge2=200 / 3, rougeL=75, rougeLsum=100)


def test_error_rates_are_of_all_texts_together():
    said, true = ["a b c", "", "x"], ["a c", "d e", "x"]
    assert compute("wer", said, true) == approx(wer=3 / 5)
    assert compute("wer", true, said) == approx(wer=3 / 4)
    assert compute("cer", ["abc\td"], ["abd  d"]) == approx(cer=1 / 5)


UNDEFINED = {
    "f1": ([0, 0], [0, 0]),
    "matthews_correlation": ([1, 1], [1, 0]),
    "pearsonr": ([1.0, 1.0], [0.0, 1.0]),
    "spearmanr": ([2.0], [1.0]),
    "wer": ([""], [""]),
    "sacrebleu": (["a b"], ["a b"]),  # no four words in a row
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_is_undefined_is_zero(name, recwarn):
    assert list(compute(name, *UNDEFINED[name]).values()) == [0.0] and not len(recwarn)


def test_no_entity_at_all(recwarn):
    nothing = {"overall_precision": 0.0, "overall_recall": 0.0, "overall_f1": 0.0, "overall_accuracy": 1.0}
    assert compute("seqeval", [["O", "O"]], [["O", "O"]]) == nothing and not len(recwarn)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("acuracy", [1], [1]), "unknown metric 'acuracy': choose one of accuracy, f1"),
        (("accuracy", [1], [1, 2]), "1 predictions for 2 references"),
        (("accuracy", [], []), "nothing to compare"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        compute(*arguments)


def test_a_missing_package_is_named_before_anything_runs(monkeypatch):
    require_packages()
    found = scores.importlib.util.find_spec
    monkeypatch.setattr(scores.importlib.util, "find_spec", lambda name: None if name == "seqeval" else found(name))
    with pytest.raises(ModuleNotFoundError, match=r"need seqeval, .* pip install 'hf_xformers\[train\]'"):
        require_packages()


def test_nothing_is_loaded_before_it_is_used():
    code = f"import sys, hf_xformers.metrics; print(sorted(set(sys.modules) & set({scores.PACKAGES})))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert set(METRICS) >= {"accuracy", "seqeval", "rouge", "wer"}
