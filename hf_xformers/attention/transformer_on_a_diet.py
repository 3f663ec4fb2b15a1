# SPDX-License-Identifier: Apache-2.0
"""Transformer on a Diet: a few keys per token, farther apart, or a wider window, from layer to layer."""

from __future__ import annotations

import functools
from typing import Literal

from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..core.components import bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .shared.pattern_spec import BlockSparseSpec, window_cache

FARTHEST = 2**40  # no text has so many tokens, and positions times gaps still fit 64 bits


@register("attention", "transformer_on_a_diet", aliases=("diet",))
class DietSpec(BlockSparseSpec):
    """Sets of keys that depend on the layer l = 0, 1, ... alone (Wang, Ye, Zhang, Zhang and Smola 2020, arXiv
    2002.06170, section 2):

    - dilated: N_l(i) = {i - t B^l : 0 <= t < K}, so that n layers reach 1 + (K - 1) (B^n - 1) / (B - 1) tokens;
    - dilated_mem: the union of the dilated sets of layers 0 .. l;
    - cascade: N_l(i) = {j : 0 <= i - j < w M^l};
    - full: all tokens up to i.

    All heads of a layer read the same set. An encoder (not in the paper) reads the mirror image of a set, too. Time
    and memory O(T K), O(T K l) and O(T w M^l) in layer l; state: as many tokens as its set reaches back.

    Args:
        diet_type: which of the four.
        kernel_size: K.
        d_base: B.
        first_window_size: w, tokens, a token's own included.
        window_size_multiplier: M.
    """

    summary = "few keys per token, farther apart in each layer, or a window that grows from layer to layer"
    supports = frozenset({"packed_rows", "pair_mask", "token_numbers"})

    diet_type: Literal["full", "dilated", "dilated_mem", "cascade"] = "cascade"
    kernel_size: int = bounded(3, least=1)
    d_base: int = bounded(2, least=1)
    first_window_size: int = bounded(4, least=1)
    window_size_multiplier: int = bounded(2, least=1)

    def gap(self, layer_idx: int) -> int:
        """B^l."""
        return min(self.d_base**layer_idx, FARTHEST)

    def width(self, layer_idx: int) -> int:
        """w M^l."""
        return min(self.first_window_size * self.window_size_multiplier**layer_idx, FARTHEST)

    def pattern(self, config, layer_idx: int) -> Pattern:
        if self.diet_type == "full":
            return patterns.full()
        if self.diet_type == "cascade":
            before = self.width(layer_idx) - 1
            return patterns.band(before, 0 if config.is_decoder else before)
        before, after = self.kernel_size - 1, 0 if config.is_decoder else self.kernel_size - 1
        first = 0 if self.diet_type == "dilated_mem" else layer_idx
        gaps = dict.fromkeys(self.gap(layer) for layer in range(first, layer_idx + 1))
        return functools.reduce(lambda a, b: a | b, (patterns.dilated(before, after, gap) for gap in gaps))

    def reach(self, layer_idx: int) -> int | None:
        """The tokens back to the farthest that one reads, itself included; None: no limit."""
        if self.diet_type == "full":
            return None
        if self.diet_type == "cascade":
            return self.width(layer_idx)
        return (self.kernel_size - 1) * self.gap(layer_idx) + 1

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        reach = self.reach(layer_idx)
        return DynamicLayer() if reach is None else window_cache(reach)
