# SPDX-License-Identifier: Apache-2.0
"""A sliding window."""

from __future__ import annotations

from transformers.cache_utils import CacheLayerMixin

from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.block_sparse.patterns import Pattern
from .shared.pattern_spec import BlockSparseSpec, check_layers, largest, of_layer, window, window_cache
from .shared.window_parts import form_of_window


@register("attention", "band_attention", aliases=("band", "local_attention"))
class BandSpec(BlockSparseSpec):
    """Sliding window (the band of the survey, section 4.1.1). Time and memory O(T window).

    window_size: keys on each side of a token; in a decoder, keys that a token reads, its own included. One number, or
    a tuple with one per layer.
    """

    summary = "a sliding window"
    supports = frozenset({"packed_rows", "pair_mask", "token_numbers"})
    head_options = frozenset({"cap", "norm", "parts", "sink"})

    window_size: int | tuple[int, ...] = bounded(256, "window", least=1)

    def check(self, config) -> None:
        check_layers(self.type, "window_size", self.window_size, config)

    def pattern(self, config, layer_idx: int) -> Pattern:
        return window(of_layer(self.window_size, layer_idx), config.is_decoder)

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return form_of_window(self, config, SequenceForm.NEIGHBOURS)

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        return window_cache(largest(self.window_size))
