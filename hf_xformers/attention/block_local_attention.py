# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens that read themselves and their neighbors."""

from __future__ import annotations

from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from .shared.pattern_spec import BlockSparseSpec
from .shared.window_parts import form_of_window


@register("attention", "block_local_attention", aliases=("block_local",))
class BlockLocalSpec(BlockSparseSpec):
    """Blocks of tokens that read themselves, and whole neighboring blocks where wanted (the survey, section 4.1.1;
    Liu et al. 2018, arXiv 1801.10198, section 4.2.4). Time O(T block_size (1 + neighbors)).

    Without neighbors no layer carries anything from one block to another; mix it with other layers.

    Args:
        block_size: tokens.
        blocks_before, blocks_after: neighbors on each side (a decoder has none after).
        ring: the last block of a text stands before its first (the local layers of Reformer's released code); it
            changes nothing in a decoder and is refused there.
    """

    summary = "blocks that read themselves and their neighbors"

    block_size: int = bounded(256, least=1)
    blocks_before: int = bounded(0, least=0)
    blocks_after: int = bounded(0, least=0)
    ring: bool = False

    def check(self, config) -> None:
        if config.is_decoder and self.blocks_after:
            raise ValueError(
                f"block_local_attention in a decoder cannot read later blocks, got `blocks_after` {self.blocks_after};"
                " use 0."
            )
        if config.is_decoder and self.ring:
            raise ValueError(
                "block_local_attention in a decoder cannot read the last block of a text from its first, as `ring`"
                " says; set ring=False."
            )

    def pattern(self, config, layer_idx: int) -> Pattern:
        make = patterns.block_ring if self.ring else patterns.block_local
        return make(self.block_size, self.blocks_before, self.blocks_after)

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return form_of_window(self, config, SequenceForm.NEIGHBOURS)
