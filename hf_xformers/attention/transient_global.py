# SPDX-License-Identifier: Apache-2.0
"""LongT5's transient global attention: a sliding window, and summaries of all blocks of the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.prepared import Carry, Prepared, State
from ..core.reading_weights import weight_of
from ..core.visibility import DenseBias
from ..normalization.base import NormSpec
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.products import wide_products
from ..ops.common.real_tokens import real_places
from ..ops.side_keys import joined, side_attention
from ..position.t5_relative_bias import relative_buckets
from .shared.block_sparse import BlockSparseAttention
from .shared.head_parts import Heads
from .shared.pattern_spec import BlockSparseSpec, window


class BlockTable(State):
    """The biases of summaries, of layer 0."""

    weight: Tensor


class Blocks(Prepared):
    """The block of every token, [B or 1, T] (padding and tokens of texts without a whole block: 0), which tokens are
    in one, [B or 1, T], and which blocks a text has, [B or 1, S]."""

    of_token: Tensor
    inside: Tensor
    seen: Tensor


def blocks_of_text(padding_mask: Tensor | None, length: int, size: int, device: torch.device) -> Blocks:
    """Whole blocks of `size` real tokens from the first one on; what is left over belongs to the last whole block. A
    text shorter than a block has none, and one that nobody sees stands in their place."""
    if padding_mask is None:
        padding_mask = torch.ones(1, length, dtype=torch.bool, device=device)
    whole = padding_mask.sum(-1, keepdim=True) // size
    of_token = torch.minimum(real_places(padding_mask) // size, (whole - 1).clamp(min=0))
    seen = torch.arange(torch.sym_max(length // size, 1), device=device)[None] < whole
    return Blocks(of_token, padding_mask & (whole > 0), seen)


class TransientGlobalAttention(BlockSparseAttention):
    """o_i = sum_j a_ij v_j + sum_s a'_is v'_s, one softmax over the tokens j in N(i) = {j : |i - j| <= w}, with scores
    scale * q_i k_j + b_ij, and the summaries s of all blocks of the text, with scores
    scale * q_i k'_s + c[bucket(s - block(i))].

    Guo et al. 2022 (LongT5, arXiv 2112.07916, section 3.1.2). A block is G consecutive tokens, its summary
    g_s = Norm(sum of x_i in block s), x what enters this layer, and k'_s = W_k g_s, v'_s = W_v g_s with the
    projections of the tokens. Nothing of it is kept from one layer to the next ("transient"). c is a table of its own,
    [buckets, H], by T5's buckets of the distance in blocks; that of layer 0 serves all layers. Tokens after the last
    whole block belong to it, and a text shorter than a block has no summaries.

    Blocks begin at a text's first real token. Positions act on pairs of tokens: summaries have none but c, and meet
    queries that no rotation has turned. Weights given out are those of tokens; with those of the summaries, which
    stand for no single token, they sum to one.

    Time O(T (w + T / G) d), memory O(T w) and the scores of a few heads with summaries, O(T^2 / G).
    """

    spec: TransientGlobalSpec

    def __init__(self, config, spec: TransientGlobalSpec, **where):
        super().__init__(config, spec, **where)
        self.normalization: NormSpec = config.normalization
        self.summary_norm = config.normalization.build(config)
        self.block_bias = nn.Embedding(spec.num_buckets, self.num_heads) if self.layer_idx == 0 else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.block_bias is not None:
            std = config.initializer_range
            if config.initializer == "t5":
                std = config.initializer_factor * config.hidden_size**-0.5
            init.normal_(self.block_bias.weight, mean=0.0, std=std)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if self.block_bias is not None:
            context.start(BlockTable(weight_of(self.block_bias)))
        index, size = context.query_index, self.spec.block_size  # layers may differ in it
        arguments = context.padding_mask, index.shape[0], size, index.device
        context.prepare(Blocks, lambda: blocks_of_text(*arguments), size)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        own, key = self.normalized(self.q_proj(hidden_states), self.k_proj(hidden_states))
        own, key, value = (self.heads(x) for x in (own, key, self.v_proj(hidden_states)))
        query, key, value = self.place(own, key, value, context)
        blocks = context.prepared(Blocks, self.spec.block_size)
        summaries = self._summaries(hidden_states, blocks)
        sides = (own, self.keys(summaries), self.heads(self.v_proj(summaries)))
        output, weights = self._attend_with_summaries((query, key, value), sides, blocks, context)
        losses = self.losses(Heads(self, query, key, value, output, weights, context))
        return SublayerOutput(self.written(output, context, hidden_states), weights, aux_losses=losses)

    def _summaries(self, hidden_states: Tensor, blocks: Blocks) -> Tensor:
        """[B, T, D] -> g [B, S, D]."""
        batch, _, width = hidden_states.shape
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        count = blocks.seen.shape[1]
        place = torch.where(blocks.inside, blocks.of_token, count).expand(batch, -1)  # padding: to nowhere
        sums = torch.zeros(batch, count + 1, width, dtype=wide, device=hidden_states.device)
        sums = sums.scatter_add(1, place[..., None].expand(-1, -1, width), hidden_states.to(wide))[:, :-1]
        mask = {"mask": blocks.seen.expand(batch, -1)} if self.normalization.over_tokens else {}
        return self.summary_norm(sums.to(hidden_states.dtype), **mask)

    def _bias_of_blocks(self, blocks: Blocks, context: Call) -> Tensor:
        """c[bucket(s - r)] for tokens of block r and the summary s, [H, S, S]."""
        given, table = context.state(BlockTable), None
        if self.block_bias is not None:
            table = weight_of(self.block_bias)
        elif given is not None:
            table = given.weight
        if table is None:
            raise ValueError(
                "transient_global layers share the table of layer 0, which has another attention here; give layer 0"
                " transient_global, too."
            )
        count = torch.arange(blocks.seen.shape[1], device=table.device)
        spec = self.spec
        buckets = relative_buckets(
            count[None] - count[:, None],
            bidirectional=True,
            num_buckets=spec.num_buckets,
            max_distance=spec.max_distance,
        )
        return F.embedding(buckets, table).movedim(-1, 0)

    def _attend_with_summaries(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        sides: tuple[Tensor, Tensor, Tensor],
        blocks: Blocks,
        context: Call,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, H, d], and weights [B, H, T, T] where they are wanted."""
        dropout, cap = self.dropout_now, self.spec.score_cap
        own, side_key, side_value = self._by_head(sides)
        bias, of_blocks = self.score_bias(context), self._bias_of_blocks(blocks, context)
        if self.wants_weights(context):
            return self._literally(self._by_head(tokens), (own, side_key, side_value), of_blocks, blocks, context)
        query, key, value = tokens
        local: Any = block_sparse_attention(
            query,
            key,
            value,
            self.pattern,
            key_padding_mask=context.padding_mask,
            scale=self.scaling,
            dropout=dropout,
            score_bias=None if bias is None else bias.block,
            bias_is_relative=bias is not None and bias.relative,
            score_cap=cap,
            return_lse=True,
        )
        rows = blocks.of_token
        side = side_attention(
            own, side_key, side_value, of_blocks, rows, blocks.seen, scale=self.scaling, cap=cap, dropout=dropout
        )
        return joined(local, side).to(value.dtype).transpose(1, 2), None

    def _literally(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        sides: tuple[Tensor, Tensor, Tensor],
        of_blocks: Tensor,
        blocks: Blocks,
        context: Call,
    ) -> tuple[Tensor, Tensor]:
        """The equation written out, over all pairs."""
        (query, key, value), (own, side_key, side_value) = tokens, sides
        near, far = wide_products(query, key) * self.scaling, wide_products(own, side_key) * self.scaling
        if self.spec.score_cap is not None:
            cap = self.spec.score_cap
            near, far = cap * torch.tanh(near / cap), cap * torch.tanh(far / cap)
        if self.score_bias(context) is not None:
            near = near + context.given(DenseBias).matrix
        far = far + of_blocks[:, blocks.of_token].transpose(0, 1)
        local = self._pairs(context)
        seen = blocks.seen[:, None, None].expand_as(far)
        mask = torch.cat([local.expand_as(near), seen], dim=-1)
        scores = torch.cat([near, far], dim=-1).masked_fill(~mask, torch.finfo(near.dtype).min)
        weights = torch.softmax(scores, dim=-1).to(value.dtype).masked_fill(~mask, 0.0)
        dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
        output = torch.matmul(dropped, torch.cat([value, side_value], dim=2))
        return output.transpose(1, 2), weights[..., : key.shape[2]]


@register("attention", "transient_global", aliases=("longt5_global",))
class TransientGlobalSpec(BlockSparseSpec):
    """A sliding window and a summary of every block of the text (LongT5). Time O(T (window + T / block)).

    Args:
        window_size: w, tokens on each side that a token reads.
        block_size: G, tokens of a block.
        num_buckets: rows of the table of biases by the distance in blocks (even).
        max_distance: blocks from which all distances share a row.
    """

    summary = "a sliding window, and summaries of all blocks of the text"
    why_not: ClassVar[Mapping[str, str]] = {
        "causal": "a token reads the summary of its own block, with later tokens in it."
    }
    layers_apart = False  # layer 0 owns the table of all
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"token_numbers"})

    window_size: int = bounded(127, "window", least=1)
    block_size: int = bounded(16, "global_block_size", least=1)
    num_buckets: int = 32
    max_distance: int = 128

    def check_fields(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(
                f"transient_global splits `num_buckets` between two directions: it must be even and at least 4, got"
                f" {self.num_buckets}."
            )
        if self.max_distance <= self.num_buckets // 4:
            raise ValueError(
                f"transient_global needs `max_distance` above a quarter of `num_buckets` ({self.num_buckets // 4}),"
                f" got {self.max_distance}."
            )

    def carries(self, config) -> Carry:
        return Carry(BlockTable, (config.num_attention_heads, self.num_buckets, self.max_distance), of_first=True)

    def weighs(self, config) -> bool:
        return False

    def pattern(self, config, layer_idx: int) -> Pattern:
        return window(self.window_size, False)

    def build(self, config, **where) -> TransientGlobalAttention:
        return TransientGlobalAttention(config, self, **where)
