# SPDX-License-Identifier: Apache-2.0
"""Layers without a feed-forward sublayer."""

from __future__ import annotations

from ..core.components import register
from ..core.hand_overs import HandOver
from .base import BlockSpec, SublayerPlan


@register("block", "no_ffn", aliases=("attention_only",))
class NoFFNBlockSpec(BlockSpec):
    """Self-attention, cross-attention in a decoder with a memory, and nothing else.

    In a decoder that reads an encoder (Yang et al. 2020, arXiv 2010.02648) or around attention with a persistent
    memory, which does the feed-forward's work (Sukhbaatar et al. 2019, arXiv 1907.01470).
    """

    supports = frozenset({"context_parallel", "packed_rows", "unpadding"})
    summary = "attention (and cross-attention) alone"

    def check(self, config) -> None:
        reads = config.is_decoder and config.is_encoder_decoder
        if not reads and HandOver.TOKEN_MAP not in config.attention.gives | config.residual.gives:
            raise ValueError(
                f"block 'no_ffn' leaves a stack of attention {config.attention.type!r} alone without any nonlinear map"
                " of a token; use attention 'all_attention', residual 'no_residual', or the block in an"
                " encoder-decoder's decoder (`decoder={'block': 'no_ffn'}`)."
            )

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        reading = [SublayerPlan("cross_attention", "cross_attention")] if cross else []
        return [SublayerPlan("attention", "attention"), *reading]
