# SPDX-License-Identifier: Apache-2.0
"""A sliding window with holes."""

from __future__ import annotations

from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..core.components import aliased, bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .band_attention import BandSpec
from .shared.pattern_spec import by_head, check_heads, check_layers, largest, of_layer, window_cache


@register("attention", "dilated_attention", aliases=("dilated",))
class DilatedSpec(BandSpec):
    """A window with holes: token i reads i + g t for |t| <= window, in a decoder -window < t <= 0. Time O(T window).

    With the same g > 1 in all heads and layers, tokens of different residues mod g never meet: leave some head or
    layer at 1. (Longformer's paper counts the hole: its 1 is g = 2.)

    dilation: g, one number, a tuple with one per layer, or in it tuples with one per head. strided: no limit to the
    window, so that i reads all j = i mod g, in time O(T^2 / g). window_size: as for `band_attention`, in steps of g.
    """

    summary = "a sliding window with holes, or every g-th token"

    window_size: int | tuple[int, ...] = aliased(128, "window")
    dilation: int | tuple[int | tuple[int, ...], ...] = bounded(2, least=1)
    strided: bool = False

    def check(self, config) -> None:
        super().check(config)
        check_layers(self.type, "dilation", self.dilation, config)
        check_heads(self.type, self.dilation, config)

    def pattern(self, config, layer_idx: int) -> Pattern:
        width = of_layer(self.window_size, layer_idx)
        left, right = (width - 1, 0) if config.is_decoder else (width, width)
        if self.strided:
            return by_head(patterns.strided, of_layer(self.dilation, layer_idx))
        return by_head(lambda gap: patterns.dilated(left, right, gap), of_layer(self.dilation, layer_idx))

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        if self.strided:
            return DynamicLayer()
        return window_cache((largest(self.window_size) - 1) * largest(self.dilation) + 1)
