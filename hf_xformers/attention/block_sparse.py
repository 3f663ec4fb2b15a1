"""Attention over the plain patterns: band, global, dilated, random, block-local."""

from __future__ import annotations

from typing import ClassVar

from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..core.components import aliased, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .block_sparse_terms import BlockSparseWithTerms
from .shared.base import AttentionSpec
from .shared.block_sparse import BlockSparseAttention

INSIDE = {"score_terms", "head_terms"}  # acts of positions that have parameters inside attention


def of_layer(value, layer_idx: int):
    """A field that holds one value for all layers or a tuple with one for each."""
    return value[layer_idx] if isinstance(value, tuple) else value


def check_layers(name: str, field: str, value, config) -> None:
    """A tuple by layer has one entry per layer. Raises `ValueError` otherwise."""
    if isinstance(value, tuple) and len(value) != config.num_hidden_layers:
        raise ValueError(
            f"{name} has {len(value)} entries in `{field}` for {config.num_hidden_layers} layers; give one number, or"
            " one per layer."
        )


def check_at_least(name: str, minimum: int, **fields) -> None:
    """Numbers, or tuples of numbers at any depth, that must be at least `minimum`. Raises `ValueError` otherwise."""

    def numbers(value):
        return [n for entry in value for n in numbers(entry)] if isinstance(value, tuple) else [value]

    for field, value in fields.items():
        if value is not None and (value == () or min(numbers(value)) < minimum):
            raise ValueError(f"{name} needs `{field}` >= {minimum}, got {value}.")


def largest(value) -> int:
    """The largest of numbers in tuples at any depth, or the number itself."""
    return max(largest(entry) for entry in value) if isinstance(value, tuple) else value


def window_cache(keys: int) -> CacheLayerMixin:
    """A cache layer that keeps what a token needs that reads no farther than `keys` keys, its own included."""
    return DynamicSlidingWindowLayer(sliding_window=max(keys, 2))  # a window of 1 would keep everything


def window(size: int, causal: bool) -> Pattern:
    """`size` keys on each side of the query and itself; causal: `size` keys, the query's own included."""
    return patterns.band(size - 1, 0) if causal else patterns.band(size, size)


class BlockSparseSpec(AttentionSpec):
    """Base of attention over a pattern of positions; a subclass says which ([`BlockSparseSpec.pattern`])."""

    score_bias: ClassVar[bool] = True
    score_terms: ClassVar[bool] = True
    head_terms: ClassVar[bool] = True
    explicit_mask: ClassVar[bool] = True
    normalizes_heads: ClassVar[bool] = True
    caps_scores: ClassVar[bool] = True

    def pattern(self, config, layer_idx: int) -> Pattern:
        """N(i) of layer `layer_idx`; a decoder's causal order is added to it."""
        raise NotImplementedError

    def build(self, config, **where) -> BlockSparseAttention:
        if config.position.acts & INSIDE:
            return BlockSparseWithTerms(config, self, **where)
        return BlockSparseAttention(config, self, **where)


@register("attention", "band_attention", aliases=("band", "sliding_window", "local_attention"))
class BandSpec(BlockSparseSpec):
    """Sliding window (the band of the survey, section 4.1.1). Time and memory O(T window).

    window_size: keys on each side of a token; in a decoder, keys that a token reads, its own included. One number, or
    a tuple with one per layer.
    """

    summary = "a sliding window"
    packed = True

    window_size: int | tuple[int, ...] = aliased(256, "window")

    def check_fields(self) -> None:
        check_at_least(self.type, 1, window_size=self.window_size)

    def check(self, config) -> None:
        check_layers(self.type, "window_size", self.window_size, config)

    def pattern(self, config, layer_idx: int) -> Pattern:
        return window(of_layer(self.window_size, layer_idx), config.is_decoder)

    def cache_layer(self, config) -> CacheLayerMixin:
        return window_cache(largest(self.window_size))


@register("attention", "global_attention", aliases=("global",))
class GlobalSpec(BandSpec):
    """A sliding window and global tokens: the first tokens of a text read all others and are read by all. In a decoder
    they are only read, so that nothing looks ahead. Time and memory O(T (window + global tokens)).

    num_global_tokens: how many. window_size: as for `band_attention`.
    """

    summary = "a sliding window and the first tokens, which see and are seen by all"
    packed = False

    num_global_tokens: int = aliased(1, "global_tokens")

    def check_fields(self) -> None:
        super().check_fields()
        check_at_least(self.type, 1, num_global_tokens=self.num_global_tokens)

    def pattern(self, config, layer_idx: int) -> Pattern:
        everywhere = patterns.global_(first=self.num_global_tokens, rows=not config.is_decoder)
        return super().pattern(config, layer_idx) | everywhere

    def cache_layer(self, config) -> CacheLayerMixin:
        return DynamicLayer()


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
    dilation: int | tuple[int | tuple[int, ...], ...] = 2
    strided: bool = False

    def check_fields(self) -> None:
        super().check_fields()
        check_at_least(self.type, 1, dilation=self.dilation)

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

    def cache_layer(self, config) -> CacheLayerMixin:
        if self.strided:
            return DynamicLayer()
        return window_cache((largest(self.window_size) - 1) * largest(self.dilation) + 1)


def check_heads(name: str, dilation, config) -> None:
    """Entries by head have one number per head. Raises `ValueError` otherwise."""
    for entry in dilation if isinstance(dilation, tuple) else ():
        if isinstance(entry, tuple) and len(entry) != config.num_attention_heads:
            raise ValueError(
                f"{name} has {len(entry)} gaps for a layer of {config.num_attention_heads} heads; give one number, or"
                " one per head."
            )


def by_head(make, value) -> Pattern:
    """`make(value)`, or of each head's own value."""
    return patterns.per_head(*(make(one) for one in value)) if isinstance(value, tuple) else make(value)


@register("attention", "random_attention", aliases=("random",))
class RandomSpec(BlockSparseSpec):
    """Every block of tokens reads itself and a few other blocks, drawn uniformly (the survey, section 4.1.1; BigBird).

    Drawn anew for every layer and head, once and for all: the same in training, evaluation and after a reload. A
    decoder draws among earlier blocks, an encoder among all blocks of a text up to its last real token, so that texts
    of every length have as many and padding changes no draw. Time O(T blocks block_size).

    num_random_blocks: other blocks that are drawn. block_size: tokens; 1: single tokens. random_seed: of the draws.
    """

    summary = "its own block and a few random ones"

    num_random_blocks: int = aliased(3, "random_blocks")
    block_size: int = 64
    random_seed: int = 0

    def check_fields(self) -> None:
        check_at_least(self.type, 0, num_random_blocks=self.num_random_blocks)
        check_at_least(self.type, 1, block_size=self.block_size)

    def pattern(self, config, layer_idx: int) -> Pattern:
        size = self.block_size
        drawn = patterns.random_blocks(self.num_random_blocks, size, seed=self.random_seed, causal=config.is_decoder)
        return patterns.block_local(size) | drawn.for_layer(layer_idx)


@register("attention", "block_local_attention", aliases=("block_local",))
class BlockLocalSpec(BlockSparseSpec):
    """Blocks of tokens that read themselves, and whole neighbouring blocks where wanted (the survey, section 4.1.1;
    Liu et al. 2018, arXiv 1801.10198, section 4.2.4). Time O(T block_size (1 + neighbours)).

    Without neighbours no layer carries anything from one block to another; mix it with other layers.

    block_size: tokens. blocks_before, blocks_after: neighbours on each side (a decoder has none after).
    """

    summary = "blocks that read themselves and their neighbours"

    block_size: int = 256
    blocks_before: int = 0
    blocks_after: int = 0

    def check_fields(self) -> None:
        check_at_least(self.type, 1, block_size=self.block_size)
        check_at_least(self.type, 0, blocks_before=self.blocks_before, blocks_after=self.blocks_after)

    def check(self, config) -> None:
        if config.is_decoder and self.blocks_after:
            raise ValueError(
                f"block_local_attention in a decoder cannot read later blocks, got `blocks_after` {self.blocks_after};"
                " use 0."
            )

    def pattern(self, config, layer_idx: int) -> Pattern:
        return patterns.block_local(self.block_size, self.blocks_before, self.blocks_after)
