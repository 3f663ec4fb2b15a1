# SPDX-License-Identifier: Apache-2.0
"""MoBA: every query reads its own block and the few earlier ones whose mean key it likes best."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.cache import SummaryLayer
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.prepared import Prepared
from ..ops.chosen_blocks import Places, best_blocks, chosen_block_attention, chosen_block_mask
from ..ops.common.products import wide_products, widened
from ..ops.pooled_blocks import continued_means, pooled_blocks
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


def block_means(
    rows: tuple[Tensor, ...], places: Places, block: int, layer: SummaryLayer | None, wide: bool = False
) -> tuple[Tensor, ...]:
    """Means [B, K, N, d] of blocks of keys, and values, [B, K, S, d], as [`Places.in_order`] has them. layer: of the
    cache that they come from; blocks that were complete before this call are not read again. wide: in float32 at
    least."""
    if layer is not None and layer.known:
        before = places.real[:, : layer.known].sum(-1)
        given = block, before, places.tokens, rows[0].shape[2] - layer.known
        found = tuple(continued_means(means, x, *given) for means, x in zip(layer.made, rows, strict=True))
    else:
        count = None if places.order is None else places.tokens
        found = tuple(pooled_blocks(x, block, count, "mean") for x in (widened(*rows) if wide else rows))
    if layer is not None:
        layer.made, layer.known = found, rows[0].shape[2]
    return found


def summary_layer(past_key_values: Cache | None, step: int) -> SummaryLayer | None:
    """Where this execution step keeps means of blocks; None: nowhere, as without a cache and in those of others."""
    cache = self_attention_cache(past_key_values)
    layer = None if cache is None else cache.layers[step]
    return layer if isinstance(layer, SummaryLayer) else None


class MobaAttention(Attention):
    """o_i = softmax over the keys of i's own block and of the m - 1 other blocks with the largest q_i mean(k_block).

    Lu et al. 2025 (arXiv 2502.13189), eqs. 2 to 7. In a decoder other blocks are those that are over before i, and of
    its own i sees what is not later. Every query of every head chooses for itself; the choice has no gradient, and
    there are no parameters besides those of dense attention. Blocks count from a row's first real token. Time
    O(T (m b + T / b) d), memory O(T m b) in booleans. State: keys and values of all tokens, and the mean key of each
    block.
    """

    spec: MobaSpec
    unpads, joins_projections = True, True

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        output, weights = self.attend(query, key, value, context, summary_layer(past_key_values, step))
        return SublayerOutput(self.written(output, context, hidden_states), weights)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: Call, layer: SummaryLayer | None = None
    ) -> tuple[Tensor, Tensor | None]:
        places, block = places_of(context), self.spec.block_size
        in_order = places.in_order(key)
        choices = self._choices(query, in_order, places, layer)
        dropout = self.dropout_now
        if self.wants_weights(context):
            mask = chosen_block_mask(choices, places, block, self.is_causal)
            return literal_softmax_attention(query, key, value, mask, None, self.scaling, dropout)
        rows = in_order, places.in_order(value)
        output = chosen_block_attention(query, *rows, choices, places, block, self.is_causal, self.scaling, dropout)
        return output.transpose(1, 2), None

    @torch.no_grad()
    def _choices(self, query: Tensor, key: Tensor, places: Places, layer: SummaryLayer | None) -> Tensor:
        """[B, H, T, n]: the own block of each query and those that it has chosen, -1 where there are fewer."""
        block, count = self.spec.block_size, places.tokens
        (means,) = block_means((key,), places, block, layer, wide=True)  # rounded ones would choose others
        means = self.repeated(means)
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

    def cache_layer(self, config, layer_idx=0) -> SummaryLayer:
        return SummaryLayer()

    def build(self, config, **where) -> MobaAttention:
        return MobaAttention(config, self, **where)
