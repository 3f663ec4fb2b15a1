# SPDX-License-Identifier: Apache-2.0
"""Attention over a fixed pattern of positions."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ...core.call import Call
from ...core.prepared import Prepared
from ...core.visibility import DenseBias, visible_pairs
from ...ops.block_sparse.attention import block_sparse_attention
from ...ops.block_sparse.pattern_base import same_pattern
from ...ops.block_sparse.patterns import Pattern
from ...ops.common.padding import row_spans
from ...ops.common.real_tokens import from_first_real, real_first
from ...ops.score_terms.attention import take, tile_attention
from ...ops.score_terms.pattern_tiles import Rounds, pattern_tiles
from ...ops.score_terms.terms import ScoreTerms, Tiles
from .base import Attention, literal_softmax_attention
from .global_tokens import GlobalTokens
from .window_parts import attend_to_window, attend_with_globals

Inputs = tuple[Tensor, Tensor, Tensor]

# A few queries with a score bias or score terms (decoding) are computed densely: a plan of blocks for every step would
# cost more.
FEW_QUERIES = 4


class PatternTiles(Prepared):
    """The tiles of a pattern without global keys, in a slot for each pattern, number of heads and of keys, and set of
    global tokens."""

    tiles: list[tuple[slice, Rounds]]


class PatternPairs(Prepared):
    """Who may attend to whom by a pattern, [B or 1, 1 or H, T, S], in a slot for each pattern."""

    pairs: Tensor


class BlockSparseAttention(Attention):
    """o_i = sum over j in N(i) of softmax_{N(i)}(scale * q_i k_j + b_ij) v_j, where N(i) is given by a pattern of
    positions.

    Positions are counted from a row's first real token. In a decoder N(i) loses what is later than i. Time and memory
    grow with the number of pairs in the pattern. State: keys and values of all tokens seen, or, of a pattern with a
    farthest key, as many as it reaches. A token whose N(i) is empty gets zeros.

    Score terms of the config's position, and a bias next to global tokens, are added in tiles of the pattern: time
    grows with the number of pairs in its blocks; in memory are those of a few heads, also in training.
    """

    def __init__(self, config, spec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        self.pattern = same_pattern(spec.pattern(config, self.layer_idx))
        self.pattern.check_heads(self.num_heads)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if context.parts is not None or not self._literal(context, context.query_index.shape[0]):
            return
        bias = self.score_bias(context)
        self._pairs(context)
        if bias is not None and context.state(DenseBias) is None:
            matrix = bias.block(context.query_index, context.key_index)
            context.start(DenseBias(matrix if matrix.ndim == 4 else matrix[None]))

    def global_tokens(self, context: Call) -> tuple[Tensor | None, int | None]:
        """[B or 1, T] boolean mask of tokens that see and are seen by all, and the largest number of them in a row
        (None: not known); (None, 0) without any."""
        return None, 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Call,
        global_rows: Inputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As every mechanism; global_rows: queries, keys and values of the global tokens' own rows, where they
        differ."""
        if context.parts is not None:
            return self._attend_part((query, key, value), global_rows, context), None
        dropout, bias = self.dropout_now, self.score_bias(context)
        chosen, most = self.global_tokens(context)
        chosen = None if chosen is None else chosen.expand(key.shape[0], -1)
        total, padding = context.key_index.shape[0], context.padding_mask
        dropped = total - key.shape[2]  # a window's cache forgets the tokens out of reach
        if self.changes_scores or (bias is not None and chosen is not None):  # what the engine does not add
            held = copy.copy(context)
            held.key_index = context.key_index[dropped:]
            added = self.score_terms(held)
            if added is not None:
                return self._attend_with_terms(
                    (query, key, value), global_rows, added, (chosen, most), dropped, context
                )
        if self._literal(context, query.shape[2]):
            mask, matrix, inputs = self._pairs(context)[..., dropped:], None, (query, key, value)
            if chosen is not None:
                inputs, rows = (self._by_head(of) for of in (inputs, global_rows or inputs))
                return self._literal_with_globals(inputs, rows, mask, chosen, dropout, context)
            if bias is not None:
                matrix = context.given(DenseBias).matrix[..., dropped:]
            output, weights = literal_softmax_attention(
                *inputs, mask, matrix, self.scaling, dropout, self.spec.score_cap, self.sinks
            )
            return output, F.pad(weights, (dropped, 0)) if dropped else weights
        row_query, row_key, row_value = global_rows or (None, None, None)
        result: Any = block_sparse_attention(
            query,
            key,
            value,
            self.pattern,
            key_padding_mask=padding if padding is None or dropped == 0 else padding[:, dropped:],
            query_offset=total - query.shape[2],
            key_offset=dropped,
            causal=self.is_causal,
            scale=self.scaling,
            dropout=dropout,
            score_bias=None if bias is None else bias.block,
            bias_is_relative=bias is not None and bias.relative,
            segment_ids=context.segment_ids,
            global_mask=chosen,
            global_query=row_query,
            global_key=row_key,
            global_value=row_value,
            max_globals=most,
            score_cap=self.spec.score_cap,
            return_lse=self.sinks is not None,
        )
        output = result if self.sinks is None else self.less_sinks(*result)
        return output.transpose(1, 2), None

    def _attend_part(self, given: Inputs, global_rows: Inputs | None, context: Call) -> Tensor:
        """[B, t, H, d] of the tokens of this process, where each holds a part of every text."""
        chosen, most = self.global_tokens(context)
        if chosen is not None and most is not None:
            whole = cast(Tensor, context.prepared(GlobalTokens).of_texts)
            return attend_with_globals(self, given, global_rows or given, context, whole, most).transpose(1, 2)
        result = attend_to_window(self, given, context)
        return (result if self.sinks is None else self.less_sinks(*result)).transpose(1, 2)

    def _attend_with_terms(
        self,
        given: Inputs,
        global_rows: Inputs | None,
        added: ScoreTerms,
        globals_: tuple[Tensor | None, int | None],
        dropped: int,
        context: Call,
    ) -> tuple[Tensor, Tensor | None]:
        chosen, dropout, inputs = globals_[0], self.dropout_now, self._by_head(given)
        rows = inputs if global_rows is None else self._by_head(global_rows)
        if not self._literal(context, inputs[0].shape[2]):
            return self._in_tiles(inputs, rows, added, globals_, context, dropped, dropout).transpose(1, 2), None
        mask = self._pairs(context)[..., dropped:]
        if chosen is not None:
            return self._literal_with_globals(inputs, rows, mask, chosen, dropout, context, added)

        def reference(scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
            return literal_softmax_attention(*inputs, mask, bias, scale)

        output, weights = added.from_matrix(reference, *inputs, dropout)
        return output.transpose(1, 2), F.pad(weights, (dropped, 0)) if dropped else weights

    @torch.compiler.disable  # the plan of tiles is made outside of graphs
    def _in_tiles(
        self,
        inputs: Inputs,
        rows: Inputs,
        added: ScoreTerms,
        globals_: tuple[Tensor | None, int | None],
        context: Call,
        dropped: int,
        dropout: float,
    ) -> Tensor:
        """[B, H, T, d]; rows: queries, keys and values of global tokens' own rows."""
        (query, key, value), (chosen, most), scale = inputs, globals_, added.scale
        index: Tensor | None = None
        taken: Tensor | None = None
        if chosen is not None:
            real = chosen if context.padding_mask is None else chosen & context.padding_mask
            most = int(real.sum(1).max()) if most is None else most
            if most > 0:  # else all rows are padding
                index = real_first(real)[:, :most]
                taken = real.gather(1, index)
        extra = [] if index is None or taken is None else [[_columns(index, taken, query.shape[2])]]
        pieces = []
        for heads, rounds in self._tiles(context, key.shape[2], dropped, chosen):
            some, (q, k, v) = added.of_heads(heads), (x[:, heads] for x in (query * scale, key, value))
            pieces.append(tile_attention(q, k, v, some.tables, some, [*extra, *rounds], dropout))
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if index is None or taken is None:
            return output
        everything = [[_rows(index, taken, context.padding_mask, key.shape[2])]]
        whole = tile_attention(rows[0] * scale, *rows[1:], added.tables, added, everything, dropout)
        own = torch.where(taken[:, None, :, None], take(whole, index[:, None, None])[:, :, 0], 0.0)
        places = torch.where(taken, index, query.shape[2])[:, None, :, None].expand_as(own)
        return F.pad(output, (0, 0, 0, 1)).scatter(2, places, own)[:, :, :-1]

    def _tiles(self, context: Call, keys: int, dropped: int, chosen: Tensor | None) -> list[tuple[slice, Rounds]]:
        """The tiles of the pattern without global keys; made once per call for layers that have the same."""
        padding, queries = context.padding_mask, context.query_index.shape[0]

        def make() -> PatternTiles:
            tiles = pattern_tiles(
                self.pattern,
                self.num_heads,
                queries,
                keys,
                query_offset=context.key_index.shape[0] - queries,
                key_offset=dropped,
                causal=self.is_causal,
                key_padding_mask=None if padding is None else padding[:, dropped:],
                hidden_keys=chosen,
                segment_ids=context.segment_ids,
                device=context.query_index.device,
            )
            return PatternTiles(tiles)

        slot = self.pattern, self.num_heads, keys, id(self.global_tokens(context)[0])
        return context.prepare(PatternTiles, make, slot).tiles

    def _by_head(self, inputs: Inputs) -> Inputs:
        """Queries, keys and values, as many of each."""
        return inputs[0], self.repeated(inputs[1]), self.repeated(inputs[2])

    def _literal(self, context: Call, queries: int) -> bool:
        """Whether the dense equation runs: asked for, or cheaper, or the keys are slots of which some are not written,
        or the caller prepared a mask."""
        dense = self.wants_weights(context) or context.static or context.explicit_mask is not None
        added = self.score_bias(context) is not None or self.changes_scores
        return dense or (added and queries <= FEW_QUERIES)

    def _literal_with_globals(
        self,
        inputs: Inputs,
        rows: Inputs,
        mask: Tensor,
        chosen: Tensor,
        dropout: float,
        context: Call,
        added: ScoreTerms | None = None,
    ) -> tuple[Tensor, Tensor]:
        padding, visible = context.padding_mask, visible_pairs(context)
        chosen = chosen if padding is None else chosen & padding
        reads = chosen[:, None, None, :]
        if padding is not None and self.pattern.period != 1:  # padding in front of a text has no place in a pattern
            reads = reads & from_first_real(padding)[:, None, :, None]
        local = mask | (reads if visible is None else reads & visible)
        rows_of_globals = chosen[:, None, :, None]
        scale = self.scaling if added is None else added.scale
        of_all, of_rows = (None if added is None else added.matrix(*of[:2]) for of in (inputs, rows))
        own = literal_softmax_attention(*inputs, local, of_all, scale)[1]
        weights = torch.where(rows_of_globals, literal_softmax_attention(*rows, visible, of_rows, scale)[1], own)
        thinned = F.dropout(weights, dropout) if dropout else weights
        output = torch.matmul(thinned.masked_fill(rows_of_globals, 0.0), inputs[2])
        output = output + torch.matmul(thinned.masked_fill(~rows_of_globals, 0.0), rows[2])
        output = output if added is None else output + added.values_of_all(thinned)
        return output.transpose(1, 2), weights

    def _pairs(self, context: Call) -> Tensor:
        """Who may attend to whom, [B or 1, 1 or H, T, S] boolean; made once per call for each distinct pattern."""
        own = self.pattern
        return context.prepare(
            PatternPairs, lambda: PatternPairs(pattern_pairs(own, self.num_heads, context)), own
        ).pairs


def pattern_pairs(pattern: Pattern, heads: int, context: Call) -> Tensor:
    """The pattern together with padding, causal order, documents or a prepared mask, [B or 1, 1 or H, T, S]
    boolean."""
    visible = visible_pairs(context)
    query, key = context.query_index[None], context.key_index[None]
    length = torch.full_like(key[:, :1], key.shape[1])
    if pattern.period != 1:  # positions matter, and they count from the first real token to the last
        real = context.padding_mask
        if context.explicit_mask is not None and visible is not None:
            real = visible[:, 0].any(1)
        if real is not None:
            lead, length = (x[:, None] for x in row_spans(real))
            query, key = query - lead, key - lead
    query, key, length = query[:, :, None], key[:, None, :], length[:, :, None]
    own = [pattern.for_head(head) for head in range(heads)]
    distinct = {each: each.allows_within(query, key, length) for each in dict.fromkeys(own)}
    pairs = torch.stack([distinct[each] for each in (own if len(distinct) > 1 else own[:1])], dim=1)
    pairs = pairs & (query >= 0)[:, None]
    return pairs if visible is None else pairs & visible


def _columns(index: Tensor, taken: Tensor, queries: int) -> Tiles:
    """All queries with the global tokens [B, G], of which some are only filling."""
    places = torch.arange(queries, device=index.device)[None, None, None]
    allowed = taken[:, None, None, None, :].expand(-1, 1, 1, queries, -1)
    return Tiles(places, index[:, None, None], allowed)


def _rows(index: Tensor, taken: Tensor, padding: Tensor | None, keys: int) -> Tiles:
    """The global tokens [B, G] as queries with all keys."""
    places = torch.arange(keys, device=index.device)[None, None, None]
    allowed = taken[:, None, None, :, None].expand(-1, 1, 1, -1, keys)
    if padding is not None:
        allowed = allowed & padding[:, None, None, None, :]
    return Tiles(torch.where(taken, index, -1)[:, None, None], places, allowed)
