# SPDX-License-Identifier: Apache-2.0
"""Softmax attention whose scores have terms of their own.

[`term_attention`] takes any terms, a block of queries at a time; [`diagonal_attention`] terms that are numbers by
distance and further products, which are never laid out; [`window_attention`] numbers and vectors by distance inside a
moving window; [`tile_attention`] any terms over a sparse set of pairs. [`distance_products`] makes terms that are
products with vectors by distance. Each has its literal form in [`hf_xformers.ops.score_terms.reference`]; what terms
are is said in [`hf_xformers.ops.score_terms.terms`], and `pattern_tiles` and `bucket_tiles` give the tiles of the
block-sparse and of the bucketed engine.
"""

from __future__ import annotations

from .blocks import applies, plus_products, term_attention
from .diagonal import blocks_of_tiles, diagonal_attention
from .distance_products import distance_products
from .tiles import take, tile_attention
from .window import window_attention

__all__ = [
    "applies",
    "blocks_of_tiles",
    "diagonal_attention",
    "distance_products",
    "plus_products",
    "take",
    "term_attention",
    "tile_attention",
    "window_attention",
]
