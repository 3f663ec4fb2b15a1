# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (NSA): means of all blocks, the tokens of a few blocks, and a window, joined by gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import SummaryLayer
from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import band
from ..ops.chosen_blocks import Places, best_blocks, chosen_block_attention, chosen_block_mask
from ..ops.common.fused import fused_attention
from ..ops.common.products import wide_products
from .moba import block_means, places_of, summary_layer
from .shared.base import Attention, literal_softmax_attention
from .shared.query_blocks import over_query_blocks, rows_at_once, visible_softmax
from .shared.spec import AttentionSpec


class NativeSparseAttention(Attention):
    """o_i = g_1 o_compressed + g_2 o_selected + g_3 o_window, g = sigmoid(W x_i), three numbers for each head.

    Yuan et al. 2025 (arXiv 2502.11089), eqs. 5 to 12, in the form of flash-linear-attention: compressed keys and
    values are means of blocks of b tokens, which a query reads once they are over; selected are the keys of m blocks,
    the first, the query's own and the one before it always, the others by the compressed probabilities, summed over
    the heads that share keys, which choose together; the window has w tokens. All three have the same keys and values
    (the paper has three projections, and a network in place of means). The choice has no gradient; its blocks do, and
    so do the probabilities that it was made by. Time O(T (m b + w + T / b) d). State: keys and values of all tokens,
    and the means of each block.

    Raises:
        ValueError: in an encoder, as blocks are over where later tokens begin.
    """

    spec: NativeSparseSpec

    def __init__(self, config, spec: NativeSparseSpec, **where):
        super().__init__(config, spec, **where)
        self.branch_proj = nn.Linear(config.hidden_size, 3 * self.num_heads, bias=False)
        self.pattern = band(spec.window_size - 1, 0)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        start_projections(config, init, inputs=(self.branch_proj,), output=None)

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
        gates = torch.sigmoid(self.branch_proj(hidden_states)).unflatten(-1, (self.num_heads, 3))
        places, block = places_of(context), self.spec.block_size
        keys, values = places.in_order(key), places.in_order(value)
        mean_keys, mean_values = block_means((keys, values), places, block, summary_layer(past_key_values, step))
        compressed, choices = (mean_keys, mean_values), self._choices(query, mean_keys, places)
        if self.wants_weights(context):
            output, weights = self._literal(query, key, value, compressed, choices, gates, context)
            return SublayerOutput(self.o_proj(output.flatten(2)), weights)
        given = (query, keys, values, choices, places, block, True, self.scaling, self.dropout_now)
        selected = chosen_block_attention(*given).transpose(1, 2)
        parts = (self._of_means(query, *compressed, places), selected, self._of_window(query, key, value, context))
        output = sum(gates[..., n, None] * part for n, part in enumerate(parts))
        return SublayerOutput(self.o_proj(output.flatten(2)))

    def _over(self, places: Places, blocks: int) -> Tensor:
        """[B or 1, 1, T, N]: which blocks are over for a query, whose last token is the query itself or before it."""
        number = torch.arange(blocks, device=places.query.device)
        return ((number + 1) * self.spec.block_size - 1 <= places.query[..., None])[:, None]

    @torch.no_grad()
    def _choices(self, query: Tensor, means: Tensor, places: Places) -> Tensor:
        """[B, H, T, n]: the blocks that each query reads, -1 where there are fewer; the same for heads that share
        keys."""
        number, block = torch.arange(means.shape[2], device=means.device), self.spec.block_size
        own = (places.query // block)[:, None, :, None]
        over, means = self._over(places, means.shape[2]), self.repeated(means)
        always = (number == 0) | ((number <= own) & (number >= own - 1))

        def best(begin: int, end: int, part: Tensor) -> Tensor:
            open_, forced = over[:, :, begin:end], always[:, :, begin:end]
            scores = visible_softmax(wide_products(part, means) * self.scaling, open_)
            ranks = scores.unflatten(1, (-1, self.num_key_value_groups)).sum(2).masked_fill(forced, 2.0 * len(part[0]))
            return best_blocks(ranks, open_ | forced, self.spec.num_blocks).transpose(1, 2)

        at_once = rows_at_once(query.shape[0] * query.shape[1] * means.shape[2])
        found = over_query_blocks(best, query.shape[2], at_once, (query, 2)).transpose(1, 2)
        return self.repeated(found)

    def _of_means(self, query: Tensor, key: Tensor, value: Tensor, places: Places) -> Tensor:
        """What queries read of the blocks that are over, [B, T, H, d]."""
        over = self._over(places, key.shape[2])
        none = ~over.any(-1, keepdim=True)
        read = fused_attention(
            query,
            self.repeated(key),
            self.repeated(value),
            attn_mask=(over | none).expand(query.shape[0], -1, -1, -1),
            dropout_p=self.dropout_now,
            scale=self.scaling,
        )
        return read.masked_fill(none, 0.0).transpose(1, 2)

    def _of_window(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> Tensor:
        """What queries read of the last tokens, their own included, [B, T, H, d]."""
        if context.static:  # where the queries stand is a number on the device
            near, keys, values = self._near(context), self.repeated(key), self.repeated(value)
            read = fused_attention(query, keys, values, attn_mask=near, dropout_p=self.dropout_now, scale=self.scaling)
            return read.transpose(1, 2)
        options: Any = {"key_padding_mask": context.padding_mask, "scale": self.scaling, "dropout": self.dropout_now}
        offset = key.shape[2] - query.shape[2]
        found: Any = block_sparse_attention(
            query, key, value, self.pattern, query_offset=offset, causal=True, **options
        )
        return found.transpose(1, 2)

    def _near(self, context: Call) -> Tensor:
        """[B or 1, 1, T, S]: the keys in the window of each query."""
        distance = context.query_index[None, :, None] - context.key_index[None, None]
        return ((distance >= 0) & (distance < self.spec.window_size) & places_of(context).real[:, None])[:, None]

    def _literal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        compressed: tuple[Tensor, Tensor],
        choices: Tensor,
        gates: Tensor,
        context: Call,
    ) -> tuple[Tensor, Tensor]:
        """Three masked softmaxes; the weight of a block's mean is shared by its tokens."""
        places, block = places_of(context), self.spec.block_size
        of_tokens = [
            literal_softmax_attention(query, key, value, mask, None, self.scaling, self.dropout_now)
            for mask in (chosen_block_mask(choices, places, block, True), self._near(context))
        ]
        over = self._over(places, compressed[0].shape[2])
        read, of_blocks = literal_softmax_attention(query, *compressed, over, None, self.scaling, self.dropout_now)
        of_key = (places.key // block)[:, None, None].expand(*of_blocks.shape[:3], -1)
        spread = of_blocks.gather(-1, of_key) / block * places.real[:, None, None]
        outputs = [read, *(output for output, _ in of_tokens)]
        weights = [spread, *(found for _, found in of_tokens)]
        output = sum(gates[..., n, None] * part for n, part in enumerate(outputs))
        by_head = gates.transpose(1, 2)
        return output, sum(by_head[..., n, None] * part for n, part in enumerate(weights))  # type: ignore[return-value]


@register("attention", "native_sparse_attention", aliases=("nsa",))
class NativeSparseSpec(AttentionSpec):
    """block_size: b, tokens in a block. num_blocks: m, blocks of which a query reads every token, the first, its own
    and the one before it among them. window_size: w, the last tokens, its own included."""

    summary = "means of blocks, a few blocks that a query chooses, and a window, joined by gates"
    bidirectional = False
    head_options = frozenset({"norm"})
    keeps_keys_alone = True

    bias: bool = False
    block_size: int = bounded(64, least=1)
    num_blocks: int = bounded(16, least=3)
    window_size: int = bounded(512, "window", least=1)

    def cache_layer(self, config, layer_idx=0) -> SummaryLayer:
        return SummaryLayer()

    def weighs(self, config) -> bool:
        return False

    def build(self, config, **where) -> NativeSparseAttention:
        return NativeSparseAttention(config, self, **where)
