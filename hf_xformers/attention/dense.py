"""Dense attention, the vanilla mechanism: which form of it a config needs."""

from __future__ import annotations

from ..core.components import register
from .dense_attention import DenseAttention
from .dense_bias import DenseWithBias
from .dense_terms import DenseWithTerms
from .shared.base import AttentionSpec


@register("attention", "dense", aliases=("vanilla", "softmax"))
class DenseSpec(AttentionSpec):
    """Every token reads every token (that it may see)."""

    context_parallel = True
    summary = "full softmax attention"
    cross = True
    score_bias = True
    score_terms = True
    head_terms = True
    explicit_mask = True
    packed = True
    splits_heads = True
    keeps_keys_alone = True
    apart_key_states = True
    rotates_values = True
    exports_usual_path = True
    normalizes_heads = True
    caps_scores = True

    def takes_global_tokens(self) -> bool:
        return True  # as all others

    def build(self, config, **where) -> DenseAttention:
        if config.position.acts & {"score_terms", "head_terms"} and not where.get("cross"):
            return DenseWithTerms(config, self, **where)
        if "score_bias" in config.position.acts and not where.get("cross"):
            return DenseWithBias(config, self, **where)
        return DenseAttention(config, self, **where)
