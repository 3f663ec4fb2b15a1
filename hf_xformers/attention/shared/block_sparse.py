"""Attention over a fixed pattern of positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ...core.context import LayerContext
from ...ops.block_sparse.attention import block_sparse_attention
from ...ops.block_sparse.patterns import Pattern
from ...ops.common.padding import row_spans
from ...ops.common.real_tokens import from_first_real
from ...position.base import ScoreBias
from .base import Attention, literal_softmax_attention
from .position_terms import ScoreTerms
from .visibility import visible_pairs

# A few queries with a score bias or score terms (decoding) are computed densely: a plan of blocks for every step would
# cost more.
FEW_QUERIES = 4


class BlockSparseAttention(Attention):
    """o_i = sum over j in N(i) of softmax_{N(i)}(scale * q_i k_j + b_ij) v_j, where N(i) is given by a pattern of
    positions.

    Positions are counted from a row's first real token. In a decoder N(i) loses what is later than i. Time and memory
    grow with the number of pairs in the pattern. State: keys and values of all tokens seen, or, of a pattern with a
    farthest key, as many as it reaches. A token whose N(i) is empty gets zeros.
    """

    def __init__(self, config, spec, **where):
        super().__init__(config, spec, **where)
        self.pattern = spec.pattern(config, self.layer_idx)
        self.pattern.check_heads(self.num_heads)

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        if not self._literal(context, len(context.query_index)):
            return
        bias = self._bias(context)
        self._pairs(context)
        if bias is not None and "dense_bias" not in context.streams:
            matrix = bias.block(context.query_index, context.key_index)
            context.streams["dense_bias"] = matrix if matrix.ndim == 4 else matrix[None]

    def global_tokens(self, context: LayerContext) -> tuple[Tensor | None, int | None]:
        """[B or 1, T] boolean mask of tokens that see and are seen by all, and the largest number of them in a row
        (None: not known); (None, 0) without any."""
        return None, 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: LayerContext,
        global_rows: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As every mechanism; global_rows: queries, keys and values of the global tokens' own rows, where they
        differ."""
        dropout, bias = self.dropout if self.training else 0.0, self._bias(context)
        chosen, most = self.global_tokens(context)
        chosen = None if chosen is None else chosen.expand(key.shape[0], -1)
        total, padding = context.key_index.shape[0], context.padding_mask
        dropped = total - key.shape[2]  # a window's cache forgets the tokens out of reach
        if self._literal(context, query.shape[2]):
            mask, matrix = self._pairs(context)[..., dropped:], context.streams.get("dense_bias")
            inputs = (query, key, value)
            if chosen is None:
                matrix = None if matrix is None else matrix[..., dropped:]
                output, weights = literal_softmax_attention(
                    *inputs, mask, matrix, self.scaling, dropout, self.spec.score_cap
                )
                return output, F.pad(weights, (dropped, 0)) if dropped else weights
            return self._literal_with_globals(inputs, global_rows or inputs, mask, chosen, dropout, context)
        row_query, row_key, row_value = global_rows or (None, None, None)
        output = block_sparse_attention(
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
            segment_ids=context.segment_ids,
            global_mask=chosen,
            global_query=row_query,
            global_key=row_key,
            global_value=row_value,
            max_globals=most,
            score_cap=self.spec.score_cap,
        )
        return output.transpose(1, 2), None

    def _bias(self, context: LayerContext) -> ScoreBias | None:
        bias = context.shared.get("score_bias")
        return bias if isinstance(bias, ScoreBias) else None  # what score terms share is no bias

    def _literal(self, context: LayerContext, queries: int) -> bool:
        """Whether the dense equation runs: asked for, or cheaper, or the keys are slots of which some are not written,
        or the caller prepared a mask."""
        dense = self.wants_weights(context) or context.static or context.explicit_mask is not None
        added = self._bias(context) is not None or "score_terms" in self.config.position.acts
        return dense or (added and queries <= FEW_QUERIES)

    def _literal_with_globals(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor,
        chosen: Tensor,
        dropout: float,
        context: LayerContext,
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
        output = torch.matmul(thinned.masked_fill(rows_of_globals, 0.0), self.repeated(inputs[2]))
        output = output + torch.matmul(thinned.masked_fill(~rows_of_globals, 0.0), self.repeated(rows[2]))
        output = output if added is None else output + added.values(thinned)
        return output.transpose(1, 2), weights

    def _pairs(self, context: LayerContext) -> Tensor:
        """Who may attend to whom, [B or 1, 1 or H, T, S] boolean; made once per call for each distinct pattern."""
        known = context.shared.setdefault("block_sparse_pairs", {})
        if self.pattern not in known:
            known[self.pattern] = pattern_pairs(self.pattern, self.num_heads, context)
        return known[self.pattern]


def pattern_pairs(pattern: Pattern, heads: int, context: LayerContext) -> Tensor:
    """The pattern together with padding, causal order, documents or a prepared mask, [B or 1, 1 or H, T, S]
    boolean."""
    visible = visible_pairs(context)
    query, key = context.query_index[None], context.key_index[None]
    length = torch.full_like(key[:, :1], key.shape[1])
    if pattern.period != 1:  # positions matter, and they count from the first real token to the last
        real = context.padding_mask
        if context.explicit_mask is not None:
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
