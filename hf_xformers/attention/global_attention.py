# SPDX-License-Identifier: Apache-2.0
"""A sliding window and global tokens."""

from __future__ import annotations

from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..core.components import bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .band_attention import BandSpec


@register("attention", "global_attention", aliases=("global",))
class GlobalSpec(BandSpec):
    """A sliding window and global tokens: the first tokens of a text read all others and are read by all. In a decoder
    they are only read, so that nothing looks ahead. Time and memory O(T (window + global tokens)).

    num_global_tokens: how many. window_size: as for `band_attention`.
    """

    summary = "a sliding window and the first tokens, which see and are seen by all"
    supports = frozenset({"pair_mask", "token_numbers"})

    num_global_tokens: int = bounded(1, "global_tokens", least=1)

    def pattern(self, config, layer_idx: int) -> Pattern:
        everywhere = patterns.global_(first=self.num_global_tokens, rows=not config.is_decoder)
        return super().pattern(config, layer_idx) | everywhere

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        return DynamicLayer()
