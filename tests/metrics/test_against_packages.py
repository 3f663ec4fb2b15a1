"""Equal values: our metrics against the packages that define them, on random and on awkward inputs."""

import random

import numpy as np
import pytest

from hf_xformers.metrics import (
    accuracy,
    corpus_bleu,
    entities_of,
    entity_scores,
    f1,
    matthews_correlation,
    mean_squared_error,
    multilabel_accuracy,
    multilabel_f1,
    pearson,
    rouge,
    spearman,
    tokenize_13a,
)

WORDS = [
    "the",
    "cat",
    "Dog",
    "ran",
    "3,5",
    "1.5-2",
    "home.",
    "it's",
    "(x)",
    "&amp;",
    "größe",
    "well-known",
    "a",
    "...",
    "5-",
]


def texts(seed, count=30, low=0, high=14, lines=False):
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randint(low, high))]
        if lines:
            words = [word + ("\n" if draw.random() < 0.2 else "") for word in words]
        made.append(" ".join(words))
    return made


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_classification(classes, seed):
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(seed)
    gold, guess = draw.integers(0, classes, 40), draw.integers(0, classes, 40)
    guess = np.where(draw.random(40) < 0.5, gold, guess)
    assert accuracy(guess, gold)["accuracy"] == pytest.approx(metrics.accuracy_score(gold, guess), abs=1e-12)
    expected = metrics.matthews_corrcoef(gold, guess)
    assert matthews_correlation(guess, gold)["matthews_correlation"] == pytest.approx(expected, abs=1e-12)
    for average in ("macro", "micro") + (("binary",) if classes == 2 else ()):
        expected = metrics.f1_score(gold, guess, average=average)
        assert f1(guess, gold, average=average)["f1"] == pytest.approx(expected, abs=1e-12)


def test_classification_of_one_class():
    metrics = pytest.importorskip("sklearn.metrics")
    gold, guess = [1, 1, 0, 1], [1, 1, 1, 1]
    assert matthews_correlation(guess, gold) == {"matthews_correlation": 0.0}
    assert f1(guess, gold, average="macro")["f1"] == pytest.approx(metrics.f1_score(gold, guess, average="macro"))
    assert f1([0, 0], [0, 0]) == {"f1": 0.0}
    # tp 6, tn 3, fp 1, fn 2
    gold, guess = [1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [0] * 3 + [1]
    assert matthews_correlation(guess, gold)["matthews_correlation"] == pytest.approx(0.478091, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_regression(seed):
    stats, metrics = pytest.importorskip("scipy.stats"), pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(seed)
    gold = draw.integers(0, 6, 25) / 2  # with ties
    guess = gold + draw.normal(size=25).round(1)
    assert pearson(guess, gold)["pearsonr"] == pytest.approx(stats.pearsonr(guess, gold)[0], abs=1e-12)
    assert spearman(guess, gold)["spearmanr"] == pytest.approx(stats.spearmanr(guess, gold)[0], abs=1e-12)
    assert mean_squared_error(guess, gold)["mse"] == pytest.approx(metrics.mean_squared_error(gold, guess), abs=1e-12)


def tag_rows(seed, scheme, count=20):
    draw = random.Random(seed)
    marks = {"iob": "BI", "iobes": "BIES"}[scheme]
    tags = ["O", *(f"{mark}-{kind}" for mark in marks for kind in ("PER", "corp-x"))]
    return [[draw.choice(tags) for _ in range(draw.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("scheme", ["iob", "iobes"])
@pytest.mark.parametrize("seed", range(4))
def test_entities(scheme, seed):
    """Random sequences are ill-formed nearly everywhere, which is where definitions differ."""
    labeling = pytest.importorskip("seqeval.metrics.sequence_labeling")
    gold = tag_rows(seed, scheme)
    draw = random.Random(seed + 100)
    flat = sorted({tag for row in gold for tag in row})
    guess = [[tag if draw.random() < 0.7 else draw.choice(flat) for tag in row] for row in gold]
    for row in gold + guess:
        assert entities_of(row) == labeling.get_entities(row)
    ours = entity_scores(guess, gold)
    assert ours["overall_f1"] == pytest.approx(labeling.f1_score(gold, guess), abs=1e-12)
    assert ours["overall_precision"] == pytest.approx(labeling.precision_score(gold, guess), abs=1e-12)
    assert ours["overall_recall"] == pytest.approx(labeling.recall_score(gold, guess), abs=1e-12)
    assert ours["overall_accuracy"] == pytest.approx(labeling.accuracy_score(gold, guess), abs=1e-12)


def test_no_entity_at_all():
    assert entity_scores([["O", "O"]], [["O", "O"]]) == {
        "overall_precision": 0.0,
        "overall_recall": 0.0,
        "overall_f1": 0.0,
        "overall_accuracy": 1.0,
    }


@pytest.mark.parametrize("seed", range(4))
def test_bleu(seed):
    sacrebleu = pytest.importorskip("sacrebleu")
    gold = texts(seed, low=4)
    draw = random.Random(seed + 50)
    guess = [" ".join(w for w in text.split() if draw.random() < 0.8) for text in gold]
    theirs = sacrebleu.BLEU(tokenize="13a").tokenizer
    for text in gold:
        assert " ".join(tokenize_13a(text)) == theirs(text)
    assert corpus_bleu(guess, gold)["bleu"] == pytest.approx(sacrebleu.corpus_bleu(guess, [gold]).score, abs=1e-9)
    lowered = sacrebleu.corpus_bleu(guess, [gold], lowercase=True).score
    assert corpus_bleu(guess, gold, lowercase=True)["bleu"] == pytest.approx(lowered, abs=1e-9)


@pytest.mark.parametrize(
    "guess, gold",
    [
        (["a b c d"], ["a x c y"]),  # smoothed orders
        (["a b"], ["a b"]),  # shorter than four words
        ([""], ["a b c d e"]),
        (["x y z w v"], ["a b c d e"]),
        (["a b c d e f g h", "a"], ["a b c d e f", "b c d e f g"]),
    ],
)
def test_bleu_at_its_edges(guess, gold):
    sacrebleu = pytest.importorskip("sacrebleu")
    assert corpus_bleu(guess, gold)["bleu"] == pytest.approx(sacrebleu.corpus_bleu(guess, [gold]).score, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_rouge(seed):
    scoring = pytest.importorskip("rouge_score.rouge_scorer")
    guess, gold = texts(seed, lines=True), texts(seed + 1, lines=True)
    ours = rouge(guess, gold)
    scorer = scoring.RougeScorer(list(ours), use_stemmer=False)
    scores = [scorer.score(target, prediction) for target, prediction in zip(gold, guess)]
    for key, value in ours.items():
        assert value == pytest.approx(100 * np.mean([score[key].fmeasure for score in scores]), abs=1e-9), key


def test_figures_without_the_packages():
    """The same values, computed by hand, for where the packages are not installed."""
    assert entities_of(["B-A", "I-A", "I-B", "O", "I-A", "B-A"]) == [
        ("A", 0, 1),
        ("B", 2, 2),
        ("A", 4, 4),
        ("A", 5, 5),
    ]
    assert tokenize_13a("It's 3,5 (or 2-3), ok.") == ["It's", "3,5", "(", "or", "2", "-", "3", ")", ",", "ok", "."]
    # precisions 1, 2/3, 1/2 and, smoothed, 1/2 of 1/1; the lengths are equal
    expected = 100 * (3 / 4 * 1 / 3 * (1 / 2) / 2 * (1 / 4) / 1) ** 0.25
    assert corpus_bleu(["a b c x"], ["a b y c"])["bleu"] == pytest.approx(expected)
    found = rouge(["the cat sat"], ["the dog sat down"])
    assert found["rouge1"] == found["rougeL"] == pytest.approx(100 * 4 / 7)
    assert found["rouge2"] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_multilabel(seed):
    """Rows without a label and labels that never occur are among them."""
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(seed)
    gold = (draw.random((40, 5)) < 0.3).astype(int)
    guess = np.where(draw.random((40, 5)) < 0.8, gold, 1 - gold)
    gold[:, 4] = guess[:, 4] = 0
    assert multilabel_accuracy(guess, gold)["accuracy"] == pytest.approx(
        metrics.accuracy_score(gold, guess), abs=1e-12
    )
    for average in ("macro", "micro"):
        expected = metrics.f1_score(gold, guess, average=average, zero_division=0)
        assert multilabel_f1(guess, gold, average)["f1"] == pytest.approx(expected, abs=1e-12)
    assert multilabel_f1(gold[:, 4:], gold[:, 4:], "micro") == {"f1": 0.0}
    with pytest.raises(ValueError, match="take macro or micro"):
        multilabel_f1(guess, gold, "binary")
