# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens that read a few other blocks, drawn once and for all."""

from __future__ import annotations

from ..core.components import bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .shared.pattern_spec import BlockSparseSpec


@register("attention", "random_attention", aliases=("random",))
class RandomSpec(BlockSparseSpec):
    """Every block of tokens reads itself and a few other blocks, drawn uniformly (the survey, section 4.1.1; BigBird).

    Drawn anew for every layer and head, once and for all: the same in training, evaluation and after a reload. A
    decoder draws among earlier blocks, an encoder among all blocks of a text up to its last real token, so that texts
    of every length have as many and padding changes no draw. Time O(T blocks block_size).

    num_random_blocks: other blocks that are drawn. block_size: tokens; 1: single tokens. random_seed: of the draws.
    """

    summary = "its own block and a few random ones"

    num_random_blocks: int = bounded(3, "random_blocks", least=0)
    block_size: int = bounded(64, least=1)
    random_seed: int = 0

    def pattern(self, config, layer_idx: int) -> Pattern:
        size = self.block_size
        drawn = patterns.random_blocks(self.num_random_blocks, size, seed=self.random_seed, causal=config.is_decoder)
        return patterns.block_local(size) | drawn.for_layer(layer_idx)
