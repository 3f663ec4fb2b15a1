# SPDX-License-Identifier: Apache-2.0
"""Sparse Sinkhorn attention: blocks are sorted by a learned, relaxed permutation, and a query reads its own block and
the one that was sorted to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..core.cache import KeepsMore
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.holes import take
from ..core.initialization import start_linear
from ..ops.common.fused import fused_attention
from ..ops.common.head_groups import over_head_groups
from ..ops.common.products import wide_products
from ..ops.common.real_tokens import real_first, real_places
from ..ops.sinkhorn import near_and_sorted, sinkhorn, sort_blocks, with_mass
from .shared.base import Attention
from .shared.bucketed import FEW_QUERIES, BucketLayer
from .shared.spec import AttentionSpec

logger = logging.get_logger(__name__)


class SummedLayer(KeepsMore, BucketLayer):
    """Keys, values and, as labels, the running sums of what they were made of, [B, D, S]: keys do not tell them."""


class SinkhornAttention(Attention):
    """o_i = softmax over (K'_c(i), K_c(i)) of scale * q_i k, times (V'_c(i), V_c(i)); K'_c = sum_u P_cu K_u.

    Tay et al. 2020 (arXiv 2002.11296), section 3: a text is cut into blocks of `block_size` tokens, c(i) is the block
    of token i, K_u are the keys of block u and sums run place by place. P comes from the sorting network,
    R = W_2 relu(W_1 x_c + b_1) + b_2 with one row of W_2 for each head and block that there may be, of the block's
    mean x_c; (R + Gumbel noise in training) / temperature is made nearly doubly stochastic by `iterations` of
    Sinkhorn's normalization ([`sinkhorn`](../ops/sinkhorn.py)). The paper sums tokens where this takes their mean:
    scores of long blocks would be large.

    Decoder, strictly causal: x_c is the mean of all tokens up to the first one of block c; P has past blocks alone
    (the first block reads itself), and the sum of a column runs down to the row that it divides. In the paper the
    diagonal takes part, and sums of columns read later rows, so that later tokens change earlier outputs; a triangular
    matrix that is doubly stochastic can only be the identity.

    SortCut (encoder): with `sortcut_blocks` all queries read the first so many sorted blocks and nothing else.

    Blocks begin at a row's first real token. A place without a token, in the last block, has no share in K' and V',
    and a score is raised by the logarithm of the share that is there.

    Time O(T b d + n^2 b d) per head for n = T / b blocks, memory O(T b + n^2). State: keys, values and running sums
    (D numbers per token).
    """

    spec: SinkhornSpec

    joins_projections = True

    def __init__(self, config, spec: SinkhornSpec, **where):
        super().__init__(config, spec, **where)
        self.blocks = -(-config.max_position_embeddings // spec.block_size)
        if self.blocks == 1:
            logger.warning_once(
                f"sinkhorn_transformer has nothing to sort: {config.max_position_embeddings} positions are one block"
                f" of {spec.block_size}, so its attention is dense and `sort_in` and `sort_out` learn nothing; lower"
                " `block_size`."
            )
        self.sort_in = nn.Linear(config.hidden_size, config.hidden_size)
        self.sort_out = nn.Linear(config.hidden_size, self.num_heads * self.blocks)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for linear in (self.sort_in, self.sort_out):
            start_linear(config, init, linear)

    # ------------------------------------------------------------------------------------------- sorting

    def permutation(self, pooled: Tensor, counted: Tensor) -> Tensor:
        """Means of blocks [B, n, D] -> P [B, H, n, n] in float32 at least; counted [B or 1, n]: has it a token?"""
        count = pooled.shape[1]
        dtype = torch.promote_types(pooled.dtype, torch.float32)
        scores = self.sort_out(torch.relu(self.sort_in(pooled)))
        scores = scores.unflatten(-1, (self.num_heads, self.blocks))[..., :count].transpose(1, 2).to(dtype)
        scores = F.pad(scores, (0, count - scores.shape[-1]))  # beyond the last block is padding
        if self.training and self.spec.noise:
            uniform = torch.rand_like(scores).clamp(min=torch.finfo(dtype).tiny)
            scores = scores - (-uniform.log()).clamp(min=torch.finfo(dtype).tiny).log()
        allowed = counted[:, None, None, :] & counted[:, None, :, None]
        if self.is_causal:
            order = torch.ones(count, count, dtype=torch.bool, device=scores.device).tril(-1)
            allowed = allowed & order

        def some_heads(scores: Tensor) -> Tensor:  # every step of every iteration would be kept otherwise
            return sinkhorn(scores, allowed, self.spec.iterations, self.is_causal)

        with torch.autocast(scores.device.type, enabled=False):
            return over_head_groups(some_heads, scores / self.spec.temperature)

    def means(self, sums: Tensor, real: Tensor | None) -> Tensor:
        """sums [B, S, D] of tokens up to each place, real ones first -> means of blocks [B, n, D]: of the block's
        tokens, or, in a decoder, of all tokens up to its first one."""
        size = self.spec.block_size
        starts = torch.arange(0, sums.shape[1], size, device=sums.device)
        if self.is_causal:
            return sums[:, starts] / (starts + 1)[:, None]
        last = starts.new_full((1, 1), sums.shape[1]) if real is None else real.sum(-1, keepdim=True)
        ends = torch.minimum(starts + size, last)  # of [B or 1, n] blocks; the sums of padding say nothing
        total = sums.gather(1, (ends - 1).clamp(min=0)[..., None].expand(sums.shape[0], -1, sums.shape[2]))
        inside = F.pad(total[:, :-1], (0, 0, 1, 0))
        return (total - inside) / (ends - starts).clamp(min=1)[..., None]

    # ------------------------------------------------------------------------------------------- forward

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
        key, value = self.repeated(key), self.repeated(value)
        sums = self._sums(hidden_states, context, past_key_values, step)
        length = key.shape[2]
        real, order = context.padding_mask, None
        self._check_length(length, real)
        if real is not None:
            order = real_first(real)
            key, value = (take(x, order, 2) for x in (key, value))
            sums, real = take(sums, order), real.gather(1, order)
        size = self.spec.block_size
        counted = key.new_ones(1, -(-length // size), dtype=torch.bool)
        if real is not None:
            counted = _blocks(real, size, False).any(-1)
        weights = self.permutation(self.means(sums, real).to(hidden_states.dtype), counted)
        if self.wants_weights(context):
            output, seen = self._literal(query, key, value, weights, real, order, context)
            return SublayerOutput(self.o_proj(output.transpose(1, 2).flatten(2)), seen)
        there = real
        if there is None and length % size:
            there = torch.ones(1, length, dtype=torch.bool, device=key.device)
        there = None if there is None else _blocks(there, size, False)
        keys, values = (_blocks(x, size, 0.0) for x in (key, value))
        if self.spec.sortcut_blocks is not None:
            output = self._cut(query, keys, values, weights, there)
        elif not context.fresh and query.shape[2] <= FEW_QUERIES:
            output = self._few(query, keys, values, weights, there, context)
        else:
            if not context.fresh:  # the queries of cached tokens are gone; their results are not asked for
                query = torch.zeros_like(key).index_copy(2, context.query_index, query)
            query = query if order is None else take(query, order, 2)
            output = self._whole(_blocks(query, size, 0.0), keys, values, weights, there)[:, :, :length]
            if order is not None:
                output = take(output, order.argsort(dim=-1), 2)
            if not context.fresh:
                output = output.index_select(2, context.query_index)
        mask = context.query_padding_mask
        if mask is not None:
            output = output.masked_fill(~mask[:, None, :, None], 0.0)
        return SublayerOutput(self.o_proj(output.transpose(1, 2).flatten(2)))

    def _check_length(self, length: int, real: Tensor | None) -> None:
        if length <= self.blocks * self.spec.block_size:
            return
        longest = length if real is None else int(real.sum(-1).max())
        if longest > self.blocks * self.spec.block_size:
            raise ValueError(
                f"The sequence has {longest} tokens, but this sinkhorn_transformer sorts {self.blocks} blocks of"
                f" {self.spec.block_size}; shorten it, or build the model with a larger `max_position_embeddings`."
            )

    def _sums(self, states: Tensor, context: Call, cache: Cache | None, step: int) -> Tensor:
        """Running sums of the real tokens [B, S, D], float32 at least."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        mask = context.query_padding_mask
        sums = (wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)).cumsum(1)
        own = self_attention_cache(cache)
        if own is None:
            return sums
        layer = own.layers[step]
        if not isinstance(layer, SummedLayer):
            raise ValueError(
                f"sinkhorn_transformer keeps running sums next to keys and values, which the given"
                f" {type(own).__name__} has no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        if layer.labels is not None:
            sums = sums + layer.labels[..., -1:].mT
        return layer.add_labels(sums.mT).mT

    def _places(self, context: Call) -> Tensor:
        """[B or 1, T]: how many real tokens stand before each query."""
        if context.padding_mask is None:
            return context.query_index[None]
        return real_places(context.padding_mask)[:, context.query_index]

    def _options(self, there: Tensor | None) -> dict[str, Any]:
        # A decoder's sorted blocks are past ones, which are full.
        weigh = there is not None and not self.is_causal
        return {"scale": self.scaling, "dropout": self.dropout_now, "weigh": weigh}

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, there: Tensor | None) -> Tensor:
        """Every block [B, H, n, b, d] with the one sorted to it -> [B, H, n b, d]."""
        size = self.spec.block_size
        visible = None
        if self.is_causal:
            visible = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()[None, None, None]
        if there is not None:
            seen = there[:, None, :, None, :]
            visible = seen if visible is None else visible & seen

        def some_heads(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
            chosen = sort_blocks(weights, key, value, there)
            return near_and_sorted(query, key, value, chosen, visible, **self._options(there)).flatten(2, 3)

        return over_head_groups(some_heads, query, key, value, weights, random=self.dropout_now > 0)

    def _few(
        self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, there: Tensor | None, context: Call
    ) -> Tensor:
        """A few queries [B, H, t, d] against a cache, each with the blocks of its own."""
        size = self.spec.block_size
        place = self._places(context)
        batch, heads, count, width = query.shape
        number = place.div(size, rounding_mode="floor").expand(batch, count)
        rows = weights.gather(2, number[:, None, :, None].expand(-1, heads, -1, weights.shape[3]))
        chosen = sort_blocks(rows, key, value, there)
        at = number[:, None, :, None, None].expand(-1, heads, -1, size, width)
        visible = torch.arange(size, device=query.device) <= (place % size)[..., None]
        visible = visible.expand(batch, count, size)[:, None, :, None]
        own_key, own_value = key.gather(2, at), value.gather(2, at)
        options = self._options(there)
        return near_and_sorted(query[..., None, :], own_key, own_value, chosen, visible, **options)[..., 0, :]

    def _cut(self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, there: Tensor | None) -> Tensor:
        """Queries [B, H, T, d] read the first sorted blocks."""
        chosen = sort_blocks(weights[:, :, : self.spec.sortcut_blocks], key, value, there)
        mass = chosen.mass.flatten(2)
        query, keys = with_mass(query, chosen.key.flatten(2, 3), mass, self.scaling)
        mask = (mass > 0)[:, :, None].expand(-1, -1, query.shape[2], -1)
        blind = ~mask.any(-1, keepdim=True)  # such queries see everything, and read nothing
        read = query, keys, chosen.value.flatten(2, 3), mask | blind, self.dropout_now
        return fused_attention(*read, scale=self.scaling).masked_fill(blind, 0.0)

    def _literal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Tensor,
        real: Tensor | None,
        order: Tensor | None,
        context: Call,
    ) -> tuple[Tensor, Tensor]:
        """With the matrix that sorts tokens written out, [B, H, sorted places, S]. Of keys and values the real ones
        stand first."""
        size, length = self.spec.block_size, key.shape[2]
        place = torch.arange(length, device=key.device)
        real = torch.ones(1, length, dtype=torch.bool, device=key.device) if real is None else real
        rows = weights if self.spec.sortcut_blocks is None else weights[:, :, : self.spec.sortcut_blocks]
        sorts = rows.repeat_interleave(size, dim=2)[..., place // size]  # [B, H, places, S]
        same = torch.arange(sorts.shape[2], device=key.device)[:, None] % size == place % size
        sorts = sorts * (same & real[:, None, None, :])
        mass = sorts.sum(-1, keepdim=True)
        sorts = sorts / mass.masked_fill(mass == 0, 1.0)
        dtype = sorts.dtype
        query, key = query.to(dtype), key.to(dtype)
        scores = wide_products(query, sorts @ key) * self.scaling + mass.mT.masked_fill(mass.mT == 0, 1.0).log()
        hidden = (mass == 0).mT.expand_as(scores)
        if self.spec.sortcut_blocks is None:
            at = self._places(context)[:, None, :, None]
            own = place // size == at // size
            there = torch.arange(sorts.shape[2], device=key.device) // size == at // size
            hidden = hidden | ~there
            own = own & real[:, None, None, :]
            if self.is_causal:
                own = own & (place <= at)
            near = wide_products(query, key) * self.scaling
            scores, hidden = torch.cat([scores, near], -1), torch.cat([hidden, ~own.expand_as(near)], -1)
        shares = torch.softmax(scores.masked_fill(hidden, torch.finfo(dtype).min), dim=-1).masked_fill(hidden, 0.0)
        asked = context.query_padding_mask
        if asked is not None:
            shares = shares.masked_fill(~asked[:, None, :, None], 0.0)
        seen = shares[..., : sorts.shape[2]] @ sorts
        if self.spec.sortcut_blocks is None:
            seen = seen + shares[..., sorts.shape[2] :]
        if order is not None:  # back to where the tokens stand
            back = order.argsort(dim=-1)
            seen, value = take(seen, back, 3), take(value, back, 2)
        seen = seen.to(value.dtype)
        dropped = F.dropout(seen, self.dropout) if self.dropout_now else seen
        return dropped @ value, seen


def _blocks(x: Tensor, size: int, fill: Any) -> Tensor:
    """[..., S, d] (numbers) or [B, S] (booleans) with its tokens in blocks [..., n, size, d] or [B, n, size]."""
    if x.dtype == torch.bool:
        return F.pad(x, (0, -x.shape[-1] % size), value=bool(fill)).unflatten(-1, (-1, size))
    if x.shape[-2] % size:  # padding by nothing would be a copy
        x = F.pad(x, (0, 0, 0, -x.shape[-2] % size), value=fill)
    return x.unflatten(-2, (-1, size))


@register("attention", "sinkhorn_transformer", aliases=("sinkhorn",))
class SinkhornSpec(AttentionSpec):
    """
    Args:
        block_size: tokens of a block.
        iterations: of the normalization.
        temperature: divides the sorting network's scores.
        noise: Gumbel noise on them in training.
        sortcut_blocks: number of sorted blocks that all queries of an encoder read (None: the own block and the one
            sorted to it).
    """

    summary = "blocks are sorted by a learned soft permutation; a query reads its own block and the one sorted to it"
    head_options = frozenset({"norm"})

    block_size: int = bounded(64, least=1)
    iterations: int = bounded(8, least=1)
    temperature: float | int = bounded(0.75, above=0)
    noise: bool = True
    sortcut_blocks: int | None = bounded(None, least=1)

    def check(self, config) -> None:
        if self.sortcut_blocks is not None and config.is_decoder:
            raise ValueError(
                f"sinkhorn_transformer with sortcut_blocks={self.sortcut_blocks} lets every token read the whole text,"
                " which a decoder must not; leave it at None."
            )

    def places(self, config) -> int | None:
        return -(-config.max_position_embeddings // self.block_size) * self.block_size

    def cache_layer(self, config, layer_idx: int = 0) -> SummedLayer:
        return SummedLayer()

    def build(self, config, **where) -> SinkhornAttention:
        return SinkhornAttention(config, self, **where)
