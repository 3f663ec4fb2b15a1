"""BigBird: its blocks, random draws and global tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..core.components import aliased, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .bigbird_attention import BigBirdAttention
from .block_sparse import INSIDE, check_at_least
from .block_sparse_terms import BigBirdWithTerms
from .shared.base import AttentionSpec


@register("attention", "bigbird", aliases=("big_bird",))
class BigBirdSpec(AttentionSpec):
    """block_size: b, tokens. window_blocks: w, odd, the own block included. num_random_blocks: r. num_global_blocks: g
    at each end (ITC). global_mode: itc, or etc with the stack `global_tokens`. random_seed: of the draws.
    attention_type: original_full is dense attention with the same parameters."""

    summary = "a window, random blocks and global tokens"
    normalizes_heads = True
    causal = False
    explicit_mask = True
    score_bias = True
    score_terms = True
    head_terms = True
    why_not_causal = "its last block sees, and is seen by, the whole text."
    why_one_length = (
        "its random blocks are drawn for the number of blocks that was traced, so a graph takes that length alone"
    )
    inputs: ClassVar[tuple[str, ...]] = ("global_attention_mask", "max_global_tokens")

    block_size: int = 64
    window_blocks: int = 3
    num_random_blocks: int = aliased(3, "random_blocks")
    num_global_blocks: int = aliased(1, "global_blocks")
    global_mode: Literal["itc", "etc"] = "itc"
    random_seed: int = 0
    attention_type: Literal["block_sparse", "original_full"] = "block_sparse"

    def takes_global_tokens(self) -> bool:
        return self.global_mode == "etc"

    def check_fields(self) -> None:
        check_at_least("bigbird", 1, block_size=self.block_size, window_blocks=self.window_blocks)
        check_at_least(
            "bigbird", 0, num_random_blocks=self.num_random_blocks, num_global_blocks=self.num_global_blocks
        )
        if self.window_blocks % 2 == 0:
            raise ValueError(
                "bigbird's window has as many blocks on both sides, so `window_blocks` is odd, got"
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

    def build(self, config, **where) -> BigBirdAttention:
        if config.position.acts & {"score_bias", *INSIDE}:
            return BigBirdWithTerms(config, self, **where)
        return BigBirdAttention(config, self, **where)
