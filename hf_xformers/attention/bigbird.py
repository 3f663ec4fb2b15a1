# SPDX-License-Identifier: Apache-2.0
"""BigBird: a window of blocks, random blocks, and global tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.real_tokens import first_real
from .shared.block_sparse import BlockSparseAttention
from .shared.global_tokens import GlobalTokens, given_globals
from .shared.pattern_spec import traced_length_of_patterns
from .shared.spec import AttentionSpec


class BigBirdAttention(BlockSparseAttention):
    """Zaheer et al. 2020 (arXiv 2007.14062), section 2: softmax over N(i), the union of

    - a window: the token's own block of b tokens and (w - 1) / 2 blocks on each side;
    - r random blocks, drawn for each layer, head and block of tokens from the blocks outside its window;
    - global tokens, which see and are seen by all. ITC ("internal"): those of a text's first and last g blocks. ETC
      ("extended"): those of the model input `global_attention_mask`, which the stack `global_tokens` adds and sets.

    N(i) is a set: a block that is found twice counts once. Draws are a hash of seed, layer, head and block: the same
    in training, evaluation and after a reload. They are uniform over the blocks of the text, whatever its length,
    outside of window and global blocks; a text ends with its last real token, so that neither padding nor other texts
    change N(i). All tokens of a text of at most `dense_length` are global.

    Time and memory O(T b (w + r + 2 g)).
    """

    spec: BigBirdSpec

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        self.global_tokens(context)

    def global_tokens(self, context: Call) -> tuple[Tensor | None, int | None]:
        spec = self.spec
        if spec.attention_type == "original_full":
            return None, 0
        if spec.global_mode == "etc":
            return given_globals(context, None)
        slot = (spec.block_size, spec.num_global_blocks, spec.dense_length)
        found = context.prepare(GlobalTokens, lambda: GlobalTokens(*self._end_blocks(context)), slot)
        return found.chosen, found.most

    def _end_blocks(self, context: Call) -> tuple[Tensor | None, int | None]:
        """Tokens of the first and the last blocks of each text, and all of short texts."""
        size, tokens = self.spec.block_size, self.spec.num_global_blocks * self.spec.block_size
        length, dense = context.query_index.shape[0], self.spec.dense_length
        place, real = context.query_index[None], context.padding_mask
        if real is None and length > dense:
            dense = 0  # there is no short text
        if tokens == 0 and dense == 0:
            return None, 0
        if real is None:
            last = torch.full_like(place[:, :1], length - 1)
        else:
            first = first_real(real)[:, None]
            last = torch.where(real, place, first).amax(-1, keepdim=True) - first
            place = place - first
        chosen = (place < tokens) | (place // size > last // size - self.spec.num_global_blocks)
        chosen = chosen | (last < dense)
        chosen = chosen if real is None else chosen & real
        return chosen, min(max(2 * tokens, dense), length)


@register("attention", "bigbird", aliases=("big_bird",))
class BigBirdSpec(AttentionSpec):
    """
    Args:
        block_size: b, tokens.
        window_blocks: w, odd, the token's own block included.
        num_random_blocks: r.
        num_global_blocks: g at each end (ITC).
        global_mode: itc, or etc with the stack `global_tokens`.
        random_seed: of the draws.
        attention_type: original_full is dense attention with the same parameters.
        dense_length: texts of at most so many tokens are read whole (transformers' BigBird: (5 + 2 r) b).
    """

    summary = "a window, random blocks and global tokens"
    head_options = frozenset({"norm"})
    supports = frozenset({"pair_mask"})
    acts = frozenset({"head_terms", "rotation", "score_bias", "score_terms"})
    why_not: ClassVar[Mapping[str, str]] = {
        "causal": "its last block sees, and is seen by, the whole text.",
        "any_length": "its random blocks are drawn for the number of blocks that was traced, so a graph takes that"
        " length alone",
    }
    block_size: int = bounded(64, least=1)
    window_blocks: int = bounded(3, least=1)
    num_random_blocks: int = bounded(3, "random_blocks", least=0)
    num_global_blocks: int = bounded(1, "global_blocks", least=0)
    global_mode: Literal["itc", "etc"] = "itc"
    random_seed: int = 0
    attention_type: Literal["block_sparse", "original_full"] = "block_sparse"
    dense_length: int = bounded(0, least=0)

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("global_attention_mask", "max_global_tokens") if self.global_mode == "etc" else ()

    def check_fields(self) -> None:
        if self.dense_length and self.global_mode == "etc":
            raise ValueError(
                f"bigbird's `dense_length` ({self.dense_length}) needs global_mode='itc'; with 'etc' the stack chooses"
                " the global tokens, so leave it 0."
            )
        if self.window_blocks % 2 == 0:
            raise ValueError(
                "bigbird's window has as many blocks on both sides, so `window_blocks` must be odd, got"
                f" {self.window_blocks}."
            )

    def pattern(self, config, layer_idx: int) -> Pattern:
        if self.attention_type == "original_full":
            return patterns.full()
        side = self.window_blocks // 2
        near = patterns.block_local(self.block_size, side, side)
        if self.num_random_blocks == 0:
            return near
        drawn = patterns.random_blocks(
            self.num_random_blocks,
            self.block_size,
            seed=self.random_seed,
            before=side,
            after=side,
            first=self.num_global_blocks if self.global_mode == "itc" else 0,
            last=self.num_global_blocks if self.global_mode == "itc" else 0,
        )
        return near | drawn.for_layer(layer_idx)

    def traced_length(self, config) -> int:
        return traced_length_of_patterns(self, config)

    def build(self, config, **where) -> BigBirdAttention:
        return BigBirdAttention(config, self, **where)
