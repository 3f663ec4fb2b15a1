# SPDX-License-Identifier: Apache-2.0
"""`compute(name, predictions, references)`: each metric under the names and in the units that summaries have."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .squad import squad

Scores = dict[str, float]
PACKAGES = ("jiwer", "rouge_score", "sacrebleu", "scipy", "seqeval", "sklearn")  # imported where they are used


def require_packages() -> None:
    """Raises ModuleNotFoundError for a package of the metrics that is not installed: better than after training."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"Metrics need {name}, which is not installed: pip install 'hf_xformers[train]'", name=name
            )


def is_error(metric: str) -> bool:
    """Whether less of a metric, with or without `eval_`, is better."""
    return metric.removeprefix("eval_") in ("loss", "perplexity", "mse", "mae", "wer", "cer")


def compute(name: str, predictions: Sequence[Any], references: Sequence[Any], **options: Any) -> Scores:
    """The figures of metric `name`. options: what the metric takes besides, such as `average` of `f1`. A figure that
    is undefined (a correlation with constant predictions) is 0.

    Raises:
        ValueError: unknown metric, or sequences of different lengths or without an entry.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}: choose one of {', '.join(METRICS)}")
    if len(predictions) != len(references):
        raise ValueError(f"metric {name!r} got {len(predictions)} predictions for {len(references)} references")
    if not len(references):
        raise ValueError(f"metric {name!r} got nothing to compare; give at least one prediction and its reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is undefined, which is 0 here
        scores = METRICS[name](predictions, references, **options)
    return {key: 0.0 if math.isnan(value) else float(value) for key, value in scores.items()}


# ------------------------------------------------------------------------------------------------ classes and numbers


def _accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> Scores:
    """Of rows with any number of labels, 0/1 matrices [N, labels]: the share that is right in every label."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": accuracy_score(references, predictions)}


def _f1(predictions: Sequence[Any], references: Sequence[Any], average: str = "binary") -> Scores:
    """average: `binary`, of class 1; `macro`, the mean over classes that occur; `micro`, of the summed counts."""
    from sklearn.metrics import f1_score

    return {"f1": f1_score(references, predictions, average=average, zero_division=0)}


def _multilabel_f1(predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]], average: str) -> Scores:
    """Of 0/1 matrices [N, labels]; a column alone is for scikit-learn no matrix but two classes."""
    return _f1(predictions, references, average if len(references[0]) > 1 else "binary")


def _matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> Scores:
    from sklearn.metrics import matthews_corrcoef

    return {"matthews_correlation": matthews_corrcoef(references, predictions)}


def _mse(predictions: Sequence[float], references: Sequence[float]) -> Scores:
    from sklearn.metrics import mean_squared_error

    return {"mse": mean_squared_error(references, predictions)}


def _correlation(kind: str) -> Callable[..., Scores]:
    def correlation(predictions: Sequence[float], references: Sequence[float]) -> Scores:
        from scipy import stats

        if len(references) < 2:  # for which scipy's functions do not agree
            return {kind: math.nan}
        return {kind: getattr(stats, kind)(predictions, references).statistic}

    return correlation


# ---------------------------------------------------------------------------------------------------- tags and texts


_AS_BIOES = {"L-": "E-", "U-": "S-"}  # what BILOU calls the last tag of an entity and one that is alone


def _seqeval(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Scores:
    """Of whole entities, as conlleval counts them, micro, in BIO, BIOES or BILOU; the accuracy is of tokens."""
    from seqeval import metrics

    predictions, references = (  # seqeval by itself loses entities of BILOU that touch
        [[_AS_BIOES.get(tag[:2], tag[:2]) + tag[2:] for tag in row] for row in rows]
        for rows in (predictions, references)
    )
    scores = {
        f"overall_{name}": getattr(metrics, f"{name}_score")(references, predictions, zero_division=0)
        for name in ("precision", "recall", "f1")
    }
    return {**scores, "overall_accuracy": metrics.accuracy_score(references, predictions)}


def _sacrebleu(predictions: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Scores:
    """`bleu`, 0 to 100: nrefs:1|case:mixed|tok:13a|smooth:exp."""
    from sacrebleu import corpus_bleu

    return {"bleu": corpus_bleu(list(predictions), [list(references)], lowercase=lowercase).score}


def _rouge(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """F1 in percent, means over the texts; sentences (for Lsum) are lines."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])
    found = [scorer.score(true, said) for said, true in zip(predictions, references)]
    return {key: 100.0 * sum(scores[key].fmeasure for scores in found) / len(found) for key in scorer.rouge_types}


def _error_rate(kind: str) -> Callable[..., Scores]:
    """Errors of all texts divided by the words, or characters, of the references; space of any kind is one space."""

    def rate(predictions: Sequence[str], references: Sequence[str]) -> Scores:
        import jiwer

        said, true = ([" ".join(text.split()) for text in texts] for texts in (predictions, references))
        return {kind: getattr(jiwer, kind)(true, said)}

    return rate


METRICS: dict[str, Callable[..., Scores]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews_correlation,
    "multilabel_accuracy": _accuracy,
    "multilabel_f1": _multilabel_f1,
    "mse": _mse,
    "pearsonr": _correlation("pearsonr"),
    "spearmanr": _correlation("spearmanr"),
    "seqeval": _seqeval,
    "squad": squad,
    "sacrebleu": _sacrebleu,
    "rouge": _rouge,
    "wer": _error_rate("wer"),
    "cer": _error_rate("cer"),
}
