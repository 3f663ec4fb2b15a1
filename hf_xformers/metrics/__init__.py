"""Metrics of fine-tuning tasks: through `evaluate` where it can load its script, else computed here to equal values.

`evaluate` keeps each metric as a script on the Hub, which needs the network and often one more package. Every metric
of this folder therefore stands on its own, and is compared in the tests with the package that defines it.
"""

from .backend import BACKENDS, METRICS, compute
from .bleu import corpus_bleu, tokenize_13a
from .classification import accuracy, f1, matthews_correlation
from .correlation import mean_squared_error, pearson, spearman
from .entities import entities_of, entity_scores, is_entity_tag
from .error_rates import character_error_rate, edit_distance, word_error_rate
from .multilabel import multilabel_accuracy, multilabel_f1
from .rouge import rouge
from .squad import normalize_answer, squad

__all__ = [
    "BACKENDS",
    "METRICS",
    "accuracy",
    "character_error_rate",
    "compute",
    "corpus_bleu",
    "edit_distance",
    "entities_of",
    "entity_scores",
    "f1",
    "is_entity_tag",
    "matthews_correlation",
    "mean_squared_error",
    "multilabel_accuracy",
    "multilabel_f1",
    "normalize_answer",
    "pearson",
    "rouge",
    "spearman",
    "squad",
    "tokenize_13a",
    "word_error_rate",
]
