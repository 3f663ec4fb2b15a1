# SPDX-License-Identifier: Apache-2.0
"""What specs of attention over a pattern of positions share: their base, their checks, fields by layer and head."""

from __future__ import annotations

from transformers.cache_utils import CacheLayerMixin

from ...core.cache import WindowLayer
from ...ops.block_sparse import patterns
from ...ops.block_sparse.exported import traced_length
from ...ops.block_sparse.patterns import Pattern
from .block_sparse import BlockSparseAttention
from .spec import AttentionSpec


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


def largest(value) -> int:
    """The largest of numbers in tuples at any depth, or the number itself."""
    return max(largest(entry) for entry in value) if isinstance(value, tuple) else value


def window_cache(keys: int) -> CacheLayerMixin:
    """A cache layer that keeps what a token needs that reads no farther than `keys` keys, its own included."""
    return WindowLayer(sliding_window=max(keys, 2))  # a window of 1 would keep everything


def window(size: int, causal: bool) -> Pattern:
    """`size` keys on each side of the query and itself; causal: `size` keys, the query's own included."""
    return patterns.band(size - 1, 0) if causal else patterns.band(size, size)


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


def traced_length_of_patterns(spec, config) -> int:
    """`traced_length` of attention over patterns."""
    layers = {spec.pattern(config, layer) for layer in range(config.num_hidden_layers)}
    causal = [pattern & patterns.causal() if config.is_decoder else pattern for pattern in layers]
    return max(traced_length(pattern, config.num_attention_heads) for pattern in causal)


class BlockSparseSpec(AttentionSpec):
    """Base of attention over a pattern of positions; a subclass says which ([`BlockSparseSpec.pattern`])."""

    acts = frozenset({"head_terms", "rotation", "score_bias", "score_terms"})
    supports = frozenset({"pair_mask", "token_numbers"})
    head_options = frozenset({"cap", "norm", "parts"})

    def pattern(self, config, layer_idx: int) -> Pattern:
        """N(i) of layer `layer_idx`; a decoder's causal order is added to it."""
        raise NotImplementedError

    def traced_length(self, config) -> int:
        return traced_length_of_patterns(self, config)

    def build(self, config, **where) -> BlockSparseAttention:
        return BlockSparseAttention(config, self, **where)
