# SPDX-License-Identifier: Apache-2.0
"""DeBERTa's disentangled attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call, dropout_rate
from ..core.components import bounded, register
from ..core.prepared import State
from ..core.reading_weights import weight_of
from ..ops.score_terms.attention import distance_products
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTables, PositionTerms
from .distances import Near, pick_rows, slot_distances
from .score_terms import SelfAttentionTerms


class DistanceVectors(State):
    """Vectors by distance, [2k, D]."""

    rows: Tensor


def log_buckets(distance: Tensor, buckets: int, far: int) -> Tensor:
    """Signed buckets of signed distances (released code of the second version): distances up to `buckets` / 2 are
    exact, larger ones grow logarithmically and reach `buckets` - 1 at `far` - 1."""
    exact = buckets // 2
    size = distance.abs().clamp(min=exact)  # the logarithm is only used where distance > exact
    ratio = torch.log(size.float() / exact) / math.log((far - 1) / exact)
    logarithmic = torch.ceil(ratio * (exact - 1)).to(distance.dtype) + exact
    return torch.where(distance.abs() <= exact, distance, logarithmic * distance.sign())


class DebertaTable(Position):
    """One vector for each of 2k distances -k .. k - 1, shared by all layers."""

    def __init__(self, config, spec: DebertaSpec):
        super().__init__()
        self.table = nn.Embedding(2 * spec.reach(config), config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if spec.normalize else None

    def shared_tables(self) -> DebertaTable:
        return self

    def vectors(self) -> Tensor:
        """[2k, D]"""
        table = weight_of(self.table)
        return table if self.norm is None else self.norm(table)


class DebertaTerms(PositionTerms):
    """score_ij = (q_i k_j + q_i K^r_ij + k_j Q^r_ij) / sqrt(3 d) with K^r_ij = P_{delta(i,j)} W^{K,r} and Q^r_ij =
    P_{delta(i,j)} W^{Q,r} (eq. 4; both terms read delta(i, j), as the released code does).

    delta(i, j) = clip(i - j, -k, k - 1) + k. Each term is a product with one vector for each distance in a block of
    pairs, laid out along the diagonals: the vectors are 2k, but no number is looked up for a pair.
    """

    dropout = dropout_rate("table_dropout")

    def __init__(self, config, spec: DebertaSpec):
        super().__init__()
        self.spec, self.span = spec, spec.reach(config)
        self.far = spec.max_distance or config.max_position_embeddings
        self.heads_count, self.dropout = config.num_attention_heads, config.hidden_dropout_prob
        self.content_scale = (1 + len(spec.terms)) ** -0.5
        width, heads = config.hidden_size, config.num_attention_heads * config.head_width
        own = not spec.share_projections
        self.key_proj = nn.Linear(width, heads, bias=False) if own and "c2p" in spec.terms else None
        self.query_proj = nn.Linear(width, heads) if own and "p2c" in spec.terms else None

    def prepare(self, context: Call) -> None:
        if context.state(DistanceVectors) is None:
            context.start(DistanceVectors(context.prepared(PositionTables).module.vectors()))

    def score_terms(self, attention: Any, scale: float, context: Call) -> DebertaScores:
        vectors = context.given(DistanceVectors).rows
        if self.training and self.dropout:
            vectors = F.dropout(vectors, self.dropout)
        found = []
        if "c2p" in self.spec.terms:
            found.append((self.key_proj or attention.k_proj)(vectors))
        if "p2c" in self.spec.terms:
            found.append((self.query_proj or attention.q_proj)(vectors) * scale)
        tables = tuple(x.unflatten(-1, (self.heads_count, -1)).transpose(0, 1) for x in found)
        return DebertaScores(scale, tables, context, self.spec, self.span, self.far)


class DebertaScores(SelfAttentionTerms):
    """The terms of one call. Tables: K^r and scaled Q^r [H, 2k, d], those that there are.

    span: k. far: the distance from which all count as one, where there are buckets.
    """

    def __init__(
        self,
        scale: float,
        tables: tuple[Tensor, ...],
        context: Call,
        spec: DebertaSpec,
        span: int,
        far: int,
    ) -> None:
        super().__init__(scale, tables, context)
        self.spec, self.span, self.far = spec, span, far
        self.reach = span if spec.buckets is None else far

    def _row(self, distance: Tensor) -> Tensor:
        """distance i - j -> its row of P."""
        if self.spec.buckets is not None:
            distance = log_buckets(distance, self.span, self.far)
        return distance.clamp(-self.span, self.span - 1) + self.span

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (key,) if "p2c" in self.spec.terms else ()

    def _pair_by_pair(self) -> bool:
        """Slots that only the device knows, graphs of any length, and the literal equation."""
        return self.context.static or torch.compiler.is_compiling() or self.context.implementation == "eager"

    def _distances(self) -> tuple[int, int]:
        """The least and the greatest distance key - query (slots) whose vector some block reads."""
        queries, keys = self.num_queries, self.num_keys
        near = Near.of(self.context, slice(0, queries), keys, self.reach)
        return near.first - keys + 1 - (near.first > 0), near.stop - 1 - keys + queries + (near.stop < keys)

    def by_distance(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The vectors of all distances, for queries from the least distance on, for keys from the greatest."""
        if self._pair_by_pair():
            return ()
        least, greatest = self._distances()
        row_at = self._row(-torch.arange(least, greatest + 1, device=self.context.key_index.device))
        orders = [row_at] * ("c2p" in self.spec.terms) + [row_at.flip(0)] * ("p2c" in self.spec.terms)
        return tuple(table.index_select(1, at).unsqueeze(0) for table, at in zip(tables, orders, strict=True))

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        query, rows, keys = block.query, block.rows, block.keys
        key = block.by_key[0].take(0, keys) if block.by_key else None
        if not block.by_distance:
            pairs = Pairs.of_block(query, query[:, :, :0] if key is None else key, rows, keys)
            return self.pairs(pairs, tables).squeeze(2)
        # Beyond reach a term is one number for a query or for a key, of the vectors next to those of near keys.
        near, (least, greatest) = Near.of(self.context, rows, keys, self.reach), self._distances()
        begin = self.first_query
        low = near.first - (begin + rows.stop - 1) - (near.first > 0)
        high = near.stop - 1 - (begin + rows.start) + (near.stop < keys)
        of_queries = of_keys = None
        if "c2p" in self.spec.terms:
            of_queries = block.by_distance[0].take(low - least, high - least + 1).squeeze(0)
        if "p2c" in self.spec.terms:
            of_keys = block.by_distance[-1].take(greatest - high, greatest - low + 1).squeeze(0)
        return distance_products(query, key, of_queries, of_keys, near, keys)

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        row_at, parts = self._row(-slot_distances(pairs, self.context)), []
        if "c2p" in self.spec.terms:
            parts.append(pick_rows(pairs.query, tables[0], row_at))
        if "p2c" in self.spec.terms:
            parts.append(pick_rows(pairs.key, tables[-1], row_at.mT).mT)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


@register("position", "deberta", aliases=("disentangled",))
class DebertaSpec(PositionSpec):
    """He et al. 2021 (arXiv 2006.03654), section 3.1. Any length: distances beyond k count as k.

    Args:
        terms: `c2p` (a query's content with the key's relative position), `p2c` (a key's content with the query's).
        max_distance: k, or with buckets the distance that reaches the last one (`None`: `max_position_embeddings`).
        buckets: k logarithmic buckets to either side (the second version: 256; `None`: every distance of its own).
        share_projections: use the content's W^Q and W^K (second version).
        normalize: layer norm on P (second version).
    """

    summary = "content and relative position attend to each other in separate terms"
    acts = frozenset({"score_terms"})
    shares_tables = True

    terms: tuple[str, ...] = ("c2p", "p2c")
    max_distance: int | None = bounded(None, least=1)
    buckets: int | None = bounded(None, least=2)
    share_projections: bool = False
    normalize: bool = False

    def reach(self, config) -> int:
        """k: distances to either side that have a vector."""
        return self.buckets or self.max_distance or config.max_position_embeddings

    def check_fields(self) -> None:
        if not self.terms or len(set(self.terms)) != len(self.terms) or set(self.terms) - {"c2p", "p2c"}:
            raise ValueError(f"deberta needs 'c2p', 'p2c' or both under `terms`, each once, got {self.terms}.")

    def check(self, config) -> None:
        far = self.max_distance or config.max_position_embeddings
        if self.buckets is not None and far - 1 <= self.buckets // 2:
            raise ValueError(
                f"deberta with {self.buckets} buckets has {self.buckets // 2} exact distances, which `max_distance`"
                f" {far} must exceed by more than 1; enlarge it or leave `buckets` at None."
            )
        if self.share_projections and not config.attention.projects_keys(config):
            raise ValueError(
                "deberta with `share_projections` projects positions as attention does its keys, which attention"
                f" {config.attention.type!r} takes from its queries; leave `share_projections` off, or use attention"
                " 'dense'."
            )
        if self.share_projections and config.key_value_heads != config.num_attention_heads:
            raise ValueError(
                f"deberta with `share_projections` needs a key head per query head, got {config.key_value_heads} for "
                f"{config.num_attention_heads}; leave `num_key_value_heads` at None."
            )

    def build(self, config, **where) -> DebertaTable:
        return DebertaTable(config, self)

    def build_terms(self, config, layer_idx: int) -> DebertaTerms:
        return DebertaTerms(config, self)
