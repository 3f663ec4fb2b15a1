"""What a position adds inside attention: score terms of queries and keys, or vectors on the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ...core.context import LayerContext, self_attention_cache
from ...ops.common.products import widened
from ...ops.common.shifted_rows import SharedRows
from ...ops.score_terms.terms import Pairs, QueryBlock
from ...position.base import LayerTerms, ScoreBias
from ...position.distances import distances_of_block
from .base import Attention
from .term_blocks import VisibleTerms

# A stream with the states [B, T, D] that keys and values are made of where they are not the queries' own.
KEY_STATES = "key_states"


class PositionTerms(VisibleTerms):
    """What [`LayerTerms`] of a position add in one call."""

    def __init__(self, terms: LayerTerms, context: LayerContext, num_keys: int) -> None:
        super().__init__(context, num_keys)
        self.terms, self.has_values, self.separable = terms, terms.has_values, terms.separable

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.terms.by_query(query, tables, self.context)

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.terms.by_key(key, tables, self.context)

    def by_distance(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.terms.by_distance(tables, self.context)

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        return super().scores(block, tables) if self.separable else self.terms.scores(block, tables, self.context)

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        return self.terms.line(tables, self.context)

    def values(self, weights: Tensor, tables: tuple[Tensor, ...], rows: slice) -> Tensor:
        return self.terms.values(weights, tables, rows, self.context)

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        return super().pairs(pairs, tables) if self.separable else self.terms.pairs(pairs, tables, self.context)

    def pair_values(self, weights: Tensor, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        return self.terms.pair_values(weights, pairs, tables, self.context)


class BiasByDistance(VisibleTerms):
    """A bias [H, T + S - 1] by distance, from the last query to the first key and on: the only table."""

    separable = True

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        return tables[0]


class BiasOfPairs(VisibleTerms):
    """A bias of which nothing is known but how to evaluate it on blocks of pairs. Its only table has the numbers of
    the heads."""

    def __init__(self, bias: ScoreBias, context: LayerContext, num_keys: int) -> None:
        super().__init__(context, num_keys)
        self.bias = bias

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        matrix = self.bias.block(self.context.query_index[block.rows], self.context.key_index[: block.keys])
        return matrix[..., tables[0][:, 0].long(), :, :].expand(1, -1, -1, -1)

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        heads = tables[0][:, 0].long()
        queries, keys = self.context.query_index[pairs.query_at], self.context.key_index[pairs.key_at]
        if queries.shape[1] == keys.shape[1] == 1:
            return self.bias.block(queries[:, 0], keys[:, 0]).transpose(1, 2)[:, heads]
        found = []  # heads that look at different pairs are evaluated one by one
        for number, head in enumerate(heads.tolist()):
            own = (x[:, number if x.shape[1] > 1 else 0] for x in (queries, keys))
            found.append(self.bias.block(*own)[:, :, head])
        return torch.stack(found, dim=1)


class ScoreTerms(NamedTuple):
    """What a position adds to the scores in one call of a layer. scale: the factor on queries, in tables as well."""

    scale: float
    tables: tuple[Tensor, ...]
    terms: VisibleTerms

    def of_heads(self, heads: slice) -> ScoreTerms:
        """Those of some heads."""
        return self._replace(tables=tuple(x if x.shape[0] == 1 else x[heads] for x in self.tables))

    def matrix(self, query: Tensor, key: Tensor) -> Tensor:
        """query [B, h, T, d] (not scaled), key [B, h, S, d] -> the terms of all pairs, [B or 1, h, T, S], in float32
        at least"""
        rows = slice(0, query.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            (query, key), tables = widened(query * self.scale, key), widened(*self.tables)
            of_queries = self.terms.by_query(query, tables)
            of_keys = tuple(SharedRows(x, 1) for x in self.terms.by_key(key, tables))
            of_distances = tuple(SharedRows(x, 1) for x in self.terms.by_distance(tables))
            block = QueryBlock(query, of_queries, of_keys, rows, key.shape[2], of_distances)
            return self.terms.scores(block, tables)

    def from_matrix(
        self,
        reference: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        """The literal equation: `reference(scale=..., bias=...)` gives weights [B, H, T, S] -> output [B, H, T, d] and
        these weights."""
        weights = reference(scale=self.scale, bias=self.matrix(query, key))[1]
        dropped = F.dropout(weights, dropout) if dropout else weights
        return torch.matmul(dropped, value) + self.values(dropped), weights

    def values(self, weights: Tensor) -> Tensor | float:
        """weights [B, h, T, S] -> what is added to the output, [B, h, T, d] or 0"""
        if not self.terms.has_values:
            return 0.0
        return self.terms.values(weights, self.tables, slice(0, weights.shape[2]))


class WithScoreTerms(Attention):
    """A layer of attention with what the config's position has on it."""

    def __init__(self, config, spec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        self.position_terms: LayerTerms | None = None
        if config.position.acts & {"score_terms", "head_terms"}:
            self.position_terms = config.position.build_terms(config, layer_idx=layer_idx)

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        if self.position_terms is not None:
            self.position_terms.prepare(context)
        super().prepare(context, past_key_values)

    def score_terms(self, context: LayerContext) -> ScoreTerms | None:
        """The terms of all heads in this call, a bias included; None without any."""
        keys = context.key_index.shape[0]
        if self.position_terms is None:
            bias = context.shared.get("score_bias")
            if bias is None:
                return None
            if not bias.relative:
                heads = torch.arange(self.num_heads, device=context.key_index.device)[:, None]
                return ScoreTerms(self.scaling, (heads,), BiasOfPairs(bias, context, keys))
            line = bias.by_distance(distances_of_block(context, slice(None), keys))
            return ScoreTerms(self.scaling, (line,), BiasByDistance(context, keys))
        if not self.position_terms.changes_scores:
            return None
        scale = self.scaling * self.position_terms.content_scale
        tables = self.position_terms.tables(self, scale, context)
        return ScoreTerms(scale, tables, PositionTerms(self.position_terms, context, keys))


class WithPositionTerms(WithScoreTerms):
    """The same for mechanisms whose queries, keys and values are plain projections; it stands in front of the
    mechanism among the bases."""

    def project_self(
        self, hidden_states: Tensor, context: LayerContext, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.position_terms is None:
            return super().project_self(hidden_states, context, past_key_values, step)
        source = context.streams.get(KEY_STATES, hidden_states)
        query = self.queries(hidden_states)
        key, value = self.keys(source), self.heads(self.v_proj(source))
        query, key, value = self.position_terms.heads(query, key, value, context)
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            key, value = cache.update(key, value, step)
        return query, key, value
