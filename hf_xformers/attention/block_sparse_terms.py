"""Attention over a pattern of positions, with what a position adds inside it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.context import LayerContext
from ..ops.common.real_tokens import real_first
from ..ops.score_terms.attention import take, tile_attention
from ..ops.score_terms.pattern_tiles import Rounds, pattern_tiles
from ..ops.score_terms.terms import Tiles
from .bigbird_attention import BigBirdAttention
from .longformer_attention import LongformerAttention
from .shared.base import literal_softmax_attention
from .shared.block_sparse import BlockSparseAttention
from .shared.position_terms import ScoreTerms, WithPositionTerms

Inputs = tuple[Tensor, Tensor, Tensor]


class BlockSparseWithTerms(WithPositionTerms, BlockSparseAttention):
    """softmax over N(i) of (scale * q_i k_j + term_ij), times v_j [+ term of the values], the terms as the config's
    position says and N(i) as the pattern and the global tokens do.

    Time grows with the number of pairs in the pattern's blocks; in memory are those of a few heads, also in training.
    Positions that only add to queries, keys and values leave the engine of [`BlockSparseAttention`] in place.
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: LayerContext,
        global_rows: Inputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        dropped = context.key_index.shape[0] - key.shape[2]  # a window's cache forgets the tokens out of reach
        held = copy.copy(context)
        held.key_index = context.key_index[dropped:]
        added = self.score_terms(held)
        if added is None:
            return super().attend(query, key, value, context, global_rows)
        dropout = self.dropout if self.training else 0.0
        inputs = (query, self.repeated(key), self.repeated(value))
        rows = inputs if global_rows is None else (global_rows[0], *(self.repeated(x) for x in global_rows[1:]))
        chosen = self.global_tokens(context)[0]
        chosen = None if chosen is None else chosen.expand(key.shape[0], -1)
        if not self._literal(context, query.shape[2]):
            return self._in_tiles(inputs, rows, added, chosen, context, dropped, dropout).transpose(1, 2), None
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
        chosen: Tensor | None,
        context: LayerContext,
        dropped: int,
        dropout: float,
    ) -> Tensor:
        """[B, H, T, d]; rows: queries, keys and values of global tokens' own rows."""
        (query, key, value), scale = inputs, added.scale
        index = taken = None
        if chosen is not None:
            real = chosen if context.padding_mask is None else chosen & context.padding_mask
            most = int(real.sum(1).max())
            if most > 0:  # else all rows are padding
                index = real_first(real)[:, :most]
                taken = real.gather(1, index)
        extra = [] if index is None else [[_columns(index, taken, query.shape[2])]]
        pieces = []
        for heads, rounds in self._tiles(context, key.shape[2], dropped, chosen):
            some, parts = added.of_heads(heads), (x[:, heads] for x in (query * scale, key, value))
            pieces.append(tile_attention(*parts, some.tables, some.terms, [*extra, *rounds], dropout))
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if index is None:
            return output
        everything = [[_rows(index, taken, context.padding_mask, key.shape[2])]]
        whole = tile_attention(rows[0] * scale, *rows[1:], added.tables, added.terms, everything, dropout)
        own = torch.where(taken[:, None, :, None], take(whole, index[:, None, None])[:, :, 0], 0.0)
        places = torch.where(taken, index, query.shape[2])[:, None, :, None].expand_as(own)
        return F.pad(output, (0, 0, 0, 1)).scatter(2, places, own)[:, :, :-1]

    def _tiles(
        self, context: LayerContext, keys: int, dropped: int, chosen: Tensor | None
    ) -> list[tuple[slice, Rounds]]:
        """The tiles of the pattern without global keys; made once per call for each distinct pattern."""
        known = context.shared.setdefault("pattern_tiles", {})
        if self.pattern not in known:
            padding, queries = context.padding_mask, context.query_index.shape[0]
            known[self.pattern] = pattern_tiles(
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
        return known[self.pattern]


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


class LongformerWithTerms(BlockSparseWithTerms, LongformerAttention):
    """Longformer's attention with what a position adds inside it; its global tokens' own queries and keys have the
    same terms."""

    def _global_rows(self, hidden_states: Tensor, context: LayerContext) -> Inputs | None:
        rows = super()._global_rows(hidden_states, context)
        if rows is None or self.position_terms is None:
            return rows
        return self.position_terms.heads(*rows, context)


class BigBirdWithTerms(BlockSparseWithTerms, BigBirdAttention):
    """BigBird's attention with what a position adds inside it."""
