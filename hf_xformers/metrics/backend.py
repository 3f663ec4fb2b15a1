"""One door to the metrics: `compute(name, predictions, references)`, with `evaluate` or without it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .bleu import corpus_bleu
from .classification import accuracy, f1, matthews_correlation
from .correlation import mean_squared_error, pearson, spearman
from .entities import entity_scores
from .error_rates import character_error_rate, word_error_rate
from .multilabel import multilabel_accuracy, multilabel_f1
from .rouge import rouge
from .squad import squad

BACKENDS = ("auto", "evaluate", "own")
# Metrics that are a configuration of one of evaluate's: its name and the configuration.
_CONFIGURED = {"multilabel_accuracy": ("accuracy", "multilabel"), "multilabel_f1": ("f1", "multilabel")}
Scores = dict[str, float]


def compute(
    name: str, predictions: Sequence[Any], references: Sequence[Any], *, backend: str = "auto", **options: Any
) -> Scores:
    """The figures of metric `name`, the same keys and values from either backend.

    backend: `auto` takes `evaluate` if it can load the metric's script and its packages are installed, else our own;
    `evaluate` and `own` insist. options: what the metric takes besides, such as `average` of `f1`. A figure that is
    undefined (a correlation with constant predictions) is 0.

    Raises:
        ValueError: unknown metric or backend, sequences of different lengths or without an entry, or a script that
            `evaluate` cannot load although the backend insists on it.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}: choose one of {', '.join(METRICS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown metric backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if len(predictions) != len(references):
        raise ValueError(f"metric {name!r} got {len(predictions)} predictions for {len(references)} references")
    if not len(references):
        raise ValueError(f"metric {name!r} got nothing to compare; give at least one prediction and its reference")
    own, theirs = METRICS[name]
    script = None if backend == "own" else _script(_script_name(name, options))
    if script is None and backend == "evaluate":
        raise ValueError(
            f"evaluate cannot load its metric {_script_name(name, options)!r} (it needs the network or the Hub's"
            " cache, and the packages that the metric is made of); take --metric_backend own, whose values are the"
            " same"
        )
    scores = (own if script is None else functools.partial(theirs, script))(predictions, references, **options)
    return {key: 0.0 if math.isnan(value) else float(value) for key, value in scores.items()}


def loads_script(name: str, **options: Any) -> bool:
    """Whether `auto` would take `evaluate` for this metric."""
    return _script(_script_name(name, options)) is not None


def _script_name(name: str, options: Mapping[str, Any]) -> str:
    return "squad_v2" if name == "squad" and options.get("no_answer") else name


@functools.cache
def _script(name: str) -> Any | None:
    # A folder of that name where the command runs would be taken for the metric, and its code would be run.
    try:
        import evaluate

        script, config = _CONFIGURED.get(name, (name, None))
        return evaluate.load(f"evaluate-metric/{script}", config, module_type="metric")
    except Exception:  # no network, no script, a missing package: each has an error class of its own
        return None


# ----------------------------------------------------------------------------------------------- evaluate's signatures


def _same(script: Any, predictions: Sequence[Any], references: Sequence[Any], **options: Any) -> Scores:
    return _figures(script.compute(predictions=predictions, references=references, **options))


def _entities(script: Any, predictions: Sequence[Any], references: Sequence[Any]) -> Scores:
    found = script.compute(predictions=predictions, references=references, zero_division=0)
    return {key: value for key, value in _figures(found).items() if key.startswith("overall_")}


def _squad(
    script: Any, predictions: Sequence[str], references: Sequence[Sequence[str]], no_answer: bool = False
) -> Scores:
    extra = {"no_answer_probability": 0.0} if no_answer else {}
    found = script.compute(
        predictions=[{"id": str(i), "prediction_text": text, **extra} for i, text in enumerate(predictions)],
        references=[
            {"id": str(i), "answers": {"text": list(texts), "answer_start": [0] * len(texts)}}
            for i, texts in enumerate(references)
        ],
    )
    return {"exact_match": found["exact"] if no_answer else found["exact_match"], "f1": found["f1"]}


def _bleu(script: Any, predictions: Sequence[str], references: Sequence[str], **options: Any) -> Scores:
    found = script.compute(predictions=predictions, references=[[text] for text in references], **options)
    return {"bleu": found["score"]}


def _rouge(script: Any, predictions: Sequence[str], references: Sequence[str]) -> Scores:
    # The aggregator resamples at random; the plain mean is what it estimates.
    found = script.compute(predictions=predictions, references=references, use_aggregator=False)
    return {key: 100.0 * sum(values) / len(values) for key, values in found.items()}


def _error_rate(name: str) -> Callable[..., Scores]:
    """How evaluate's script of one rate is called, which gives a number."""

    def called(script: Any, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        return {name: float(script.compute(predictions=predictions, references=references))}

    return called


def _figures(found: Mapping[str, Any]) -> Scores:
    return {key: float(value) for key, value in found.items() if not isinstance(value, Mapping)}


# name -> (our own, how evaluate's script is called)
METRICS: dict[str, tuple[Callable[..., Scores], Callable[..., Scores]]] = {
    "accuracy": (accuracy, _same),
    "f1": (f1, _same),
    "matthews_correlation": (matthews_correlation, _same),
    "multilabel_accuracy": (multilabel_accuracy, _same),
    "multilabel_f1": (multilabel_f1, _same),
    "mse": (mean_squared_error, _same),
    "pearsonr": (pearson, _same),
    "spearmanr": (spearman, _same),
    "seqeval": (entity_scores, _entities),
    "squad": (squad, _squad),
    "sacrebleu": (corpus_bleu, _bleu),
    "rouge": (rouge, _rouge),
    "wer": (word_error_rate, _error_rate("wer")),
    "cer": (character_error_rate, _error_rate("cer")),
}
