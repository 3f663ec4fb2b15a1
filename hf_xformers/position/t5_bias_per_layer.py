# SPDX-License-Identifier: Apache-2.0
"""A relative position bias of T5's kind with a table of its own in every layer."""

from __future__ import annotations

from typing import Any

from ..core.call import Call
from ..core.components import register
from .base import Position, PositionTerms
from .distances import distances_of_block
from .score_terms import BiasByDistance, SelfAttentionTerms
from .t5_relative_bias import BucketedBias, T5RelativeBiasSpec


class T5BiasOfLayer(BucketedBias, PositionTerms):
    """score_ij += b^l[h, bucket(j - i)], a table [buckets, H] in layer l (Chung et al. 2023, section 3.1, UMT5)."""

    def score_terms(self, attention: Any, scale: float, context: Call) -> SelfAttentionTerms:
        line = self.by_distance(distances_of_block(context, slice(None), context.key_index.shape[0]))
        return BiasByDistance(scale, (line,), context)


@register("position", "t5_bias_per_layer")
class T5BiasPerLayerSpec(T5RelativeBiasSpec):
    """As `t5_relative_bias`, with a table for every layer (Chung et al. 2023, arXiv 2304.09151, UMT5)."""

    summary = "learned score bias by bucketed distance, a table in every layer"
    acts = frozenset({"score_terms"})

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> T5BiasOfLayer:
        return T5BiasOfLayer(config, self)
