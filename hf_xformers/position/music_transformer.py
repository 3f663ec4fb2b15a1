# SPDX-License-Identifier: Apache-2.0
"""Music Transformer's relative positions: one vector per distance to the past, placed by skewing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..core.reading_weights import weight_of
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTerms
from .distances import distances_of_block, pick_rows, products_by_distance, slot_distances
from .score_terms import SelfAttentionTerms


class MusicTerms(PositionTerms):
    """score_ij += q_i E_{i-j} for j <= i; the table [H or 1, max_distance, d] begins with distance 0. Distances beyond
    the table add nothing (released code), and neither do later keys, which nobody sees."""

    def __init__(self, config, spec: MusicTransformerSpec):
        super().__init__()
        heads = 1 if spec.share_heads else config.num_attention_heads
        self.table = nn.Parameter(torch.empty(heads, spec.reach(config), config.head_width))

    def initialize(self, config, init) -> None:
        init.normal_(self.table, mean=0.0, std=self.table.shape[-1] ** -0.5)

    def score_terms(self, attention: Any, scale: float, context: Call) -> MusicScores:
        return MusicScores(scale, (weight_of(self, "table"),), context)


class MusicScores(SelfAttentionTerms):
    """The terms of one call, of the table E."""

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        distance, reach = -distances_of_block(self.context, block.rows, block.keys), tables[0].shape[1]
        known = (distance >= 0) & (distance < reach)
        table = tables[0].index_select(1, distance.clamp(0, reach - 1))
        table = table.masked_fill(~known[None, :, None], 0.0).to(block.query.dtype)
        return products_by_distance(block.query, table, block.keys)  # the skewing of section 3.4.1

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        distance, reach = -slot_distances(pairs, self.context), tables[0].shape[1]
        known = (distance >= 0) & (distance < reach)
        return pick_rows(pairs.query, tables[0], distance.clamp(0, reach - 1)).masked_fill(~known, 0.0)


@register("position", "music_transformer")
class MusicTransformerSpec(PositionSpec):
    """Huang et al. 2019 (arXiv 1809.04281), section 3.4.

    max_distance: distances with a vector (`None`: `max_position_embeddings`). share_heads: one table for all heads.
    """

    summary = "a learned vector per distance to the past, placed by skewing"
    acts = frozenset({"score_terms"})
    needs_causal = True

    max_distance: int | None = bounded(None, least=1)
    share_heads: bool = False

    def reach(self, config) -> int:
        return self.max_distance or config.max_position_embeddings

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> MusicTerms:
        return MusicTerms(config, self)
