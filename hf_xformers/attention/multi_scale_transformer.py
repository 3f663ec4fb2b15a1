# SPDX-License-Identifier: Apache-2.0
"""Multi-scale attention: windows of several widths, whose heads are shared out by layer."""

from __future__ import annotations

import math

from transformers.cache_utils import CacheLayerMixin

from ..core.components import register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .shared.pattern_spec import BlockSparseSpec, window_cache


def heads_of_scales(layer: int, layers: int, heads: int, scales: int, alpha: float) -> tuple[int, ...]:
    """How many of a layer's heads have each scale, the smallest first; layers count from 0.

    n^l = softmax(z^l) H with z^l_K = 0 for the largest scale K and z^l_k = z^l_(k+1) + alpha / l for the others, l
    from 1; in the last layer z = 0. Whole numbers by largest remainders, of equal ones the smaller scale's first.
    """
    step = 0.0 if layer == layers - 1 else alpha / (layer + 1)
    powers = [math.exp(step * (scales - 1 - k)) for k in range(scales)]
    wanted = [heads * power / sum(powers) for power in powers]
    counts = [math.floor(number + 1e-9) for number in wanted]
    by_rest = sorted(range(scales), key=lambda k: round(counts[k] - wanted[k], 9))
    for k in by_rest[: heads - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


@register("attention", "multi_scale_transformer", aliases=("multi_scale",))
class MultiScaleSpec(BlockSparseSpec):
    """head_h(i) = softmax over {j : |i - j| <= w_h} (Guo, Qiu, Liu, Xue and Zhang 2020, arXiv 1912.00544, sections 3
    and 4), with few scales w for the heads of all layers. Lower layers have more heads of small scales:
    [`heads_of_scales`].

    A scale is a radius, so a head reads 2 w + 1 keys; in a decoder (not in the paper) {j : 0 <= i - j <= w}. A scale
    that is a part of the text counts real tokens, n in the paper; in a decoder, where later tokens must not widen a
    window, it is a part of `max_position_embeddings`. Time and memory O(T mean(w)), which with parts of the text is a
    smaller factor on T^2. State: as many tokens as the widest head of a layer reads.

    scales: radii in tokens (whole numbers) or parts of the text's length (numbers below 1), the smallest first.
    scale_alpha: alpha, how much lower layers prefer small scales. heads_per_scale: how many heads of each layer have
    each scale, a tuple of numbers for each layer (`None`: by alpha)."""

    summary = "windows of several widths, more small ones in lower layers"

    scales: tuple[int | float, ...] = (1, 3, 0.0625, 0.125, 0.25)
    scale_alpha: float | int = 0.5
    heads_per_scale: tuple[tuple[int, ...], ...] | None = None

    def check_fields(self) -> None:
        if not self.scales:
            raise ValueError("multi_scale_transformer needs at least one of `scales`, got none.")
        for scale in self.scales:
            if scale < 0 or (isinstance(scale, float) and not 0 < scale < 1):
                raise ValueError(
                    f"multi_scale_transformer has a scale of {scale}; give whole numbers of tokens >= 0, or parts of"
                    " the text between 0 and 1."
                )

    def check(self, config) -> None:
        if self.heads_per_scale is None:
            return
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        if len(self.heads_per_scale) != layers:
            raise ValueError(
                f"multi_scale_transformer has {len(self.heads_per_scale)} entries in `heads_per_scale` for {layers}"
                " layers; give one for each."
            )
        for counts in self.heads_per_scale:
            if len(counts) != len(self.scales) or min(counts, default=0) < 0 or sum(counts) != heads:
                raise ValueError(
                    f"multi_scale_transformer shares out the {heads} heads of a layer as {counts}; give a number for"
                    f" each of the {len(self.scales)} scales, with {heads} in all."
                )

    def counts(self, config, layer_idx: int) -> tuple[int, ...]:
        """Heads of a layer by scale."""
        if self.heads_per_scale is not None:
            return self.heads_per_scale[layer_idx]
        sizes = (config.num_hidden_layers, config.num_attention_heads, len(self.scales))
        return heads_of_scales(layer_idx, *sizes, float(self.scale_alpha))

    def pattern(self, config, layer_idx: int) -> Pattern:
        own = []
        for scale, count in zip(self.scales, self.counts(config, layer_idx), strict=True):
            own += [self._window(scale, config)] * count
        return own[0] if len(set(own)) == 1 else patterns.per_head(*own)

    def _window(self, scale: int | float, config) -> Pattern:
        if config.is_decoder:
            return patterns.band(self._radius(scale, config), 0)
        return patterns.share_band(scale) if isinstance(scale, float) else patterns.band(scale, scale)

    def _radius(self, scale: int | float, config) -> int:
        """Tokens, in a decoder."""
        return math.ceil(scale * config.max_position_embeddings) if isinstance(scale, float) else scale

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        used = [scale for scale, count in zip(self.scales, self.counts(config, layer_idx), strict=True) if count]
        return window_cache(max(self._radius(scale, config) for scale in used) + 1)
