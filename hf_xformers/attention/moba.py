# SPDX-License-Identifier: Apache-2.0
"""MoBA: every query reads its own block and the few earlier ones whose mean key it likes best."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.call import Call
from ..core.components import bounded, register
from ..core.prepared import Prepared
from ..ops.chosen_blocks import Places, best_blocks, chosen_block_attention, chosen_block_mask
from ..ops.common.products import wide_products, widened
from ..ops.pooled_blocks import pooled_blocks
from .shared.base import Attention, literal_softmax_attention
from .shared.query_blocks import over_query_blocks, rows_at_once
from .shared.spec import AttentionSpec


class TokenPlaces(Prepared):
    """[`places_of`] a call."""

    places: Places


def places_of(context: Call) -> Places:
    """Where this call's tokens stand among the real ones of their rows; made once per call."""
    arguments = context.query_index, context.key_index, context.padding_mask
    return context.prepare(TokenPlaces, lambda: TokenPlaces(Places.of(*arguments))).places


class MobaAttention(Attention):
    """o_i = softmax over the keys of i's own block and of the m - 1 other blocks with the largest q_i mean(k_block).

    Lu et al. 2025 (arXiv 2502.13189), eqs. 2 to 7. In a decoder other blocks are those that are over before i, and of
    its own i sees what is not later. Every query of every head chooses for itself; the choice has no gradient, and
    there are no parameters besides those of dense attention. Blocks count from a row's first real token. Time
    O(T (m b + T / b) d), memory O(T m b) in booleans. State: keys and values of all tokens.
    """

    spec: MobaSpec

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        places, block = places_of(context), self.spec.block_size
        in_order = places.in_order(key)
        choices = self._choices(query, in_order, places)
        dropout = self.dropout if self.training else 0.0
        if self.wants_weights(context):
            mask = chosen_block_mask(choices, places, block, self.is_causal)
            return literal_softmax_attention(query, key, value, mask, None, self.scaling, dropout)
        rows = self.repeated(in_order), self.repeated(places.in_order(value))
        output = chosen_block_attention(query, *rows, choices, places, block, self.is_causal, self.scaling, dropout)
        return output.transpose(1, 2), None

    @torch.no_grad()
    def _choices(self, query: Tensor, key: Tensor, places: Places) -> Tensor:
        """[B, H, T, n]: the own block of each query and those that it has chosen, -1 where there are fewer."""
        block, count = self.spec.block_size, places.tokens
        (wide,) = widened(key)  # rounded means would choose others
        means = self.repeated(pooled_blocks(wide, block, None if places.order is None else count, "mean"))
        number = torch.arange(means.shape[2], device=key.device)
        own = (places.query // block).expand(query.shape[0], -1)

        def best(begin: int, end: int, part: Tensor) -> Tensor:
            mine = own[:, None, begin:end, None]
            others = (
                number < mine if self.is_causal else (number != mine) & (number * block < count[:, None, None, None])
            )
            found = best_blocks(wide_products(part, means), others, self.spec.num_blocks - 1)
            return torch.cat((mine.expand(-1, found.shape[1], -1, -1), found), dim=-1).transpose(1, 2)

        at_once = rows_at_once(query.shape[0] * query.shape[1] * means.shape[2])
        return over_query_blocks(best, query.shape[2], at_once, (query, 2)).transpose(1, 2)


@register("attention", "moba")
class MobaSpec(AttentionSpec):
    """block_size: b, tokens in a block. num_blocks: m, blocks that a query reads, its own included (1: that alone)."""

    summary = "a token's own block, and the blocks that it likes best"
    head_options = frozenset({"norm"})
    keeps_keys_alone = True

    block_size: int = bounded(512, least=1)
    num_blocks: int = bounded(3, least=1)

    def build(self, config, **where) -> MobaAttention:
        return MobaAttention(config, self, **where)


__all__ = ["MobaAttention", "MobaSpec", "places_of"]
