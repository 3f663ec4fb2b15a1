# SPDX-License-Identifier: Apache-2.0
"""Graphormer's position: scores get a number for the distance of two nodes, and one for the edges between them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.call import Call, can_inspect
from ..core.components import bounded, register
from ..core.graph_inputs import GRAPH_TOKEN, UNREACHABLE
from ..core.prepared import State
from ..core.reading_weights import weight_of
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTables, PositionTerms
from .distances import distances_of_block
from .score_terms import BiasByDistance, SelfAttentionTerms


class GraphTerms(State):
    """The bias of all pairs of nodes [B, H, T, T], or of all distances in a text [1, H, 2 T - 1]."""

    pairs: Tensor | None = None
    line: Tensor | None = None


class GraphormerPosition(Position):
    """b(SPD), the edge encoding and the graph token's number, one set of tables for all layers.

    b: rows for path lengths 0 to `num_distances` - 1, one for pairs without a path, and one, t, for pairs with the
    graph token. Edges: vectors [num_edge_types, H] of edge types, and a matrix [H, H] for each hop.
    """

    def __init__(self, config, spec: GraphormerSpec):
        super().__init__()
        self.spec, heads = spec, config.num_attention_heads
        self.distances = nn.Embedding(spec.num_distances + 2, heads)
        self.edges = nn.Embedding(spec.num_edge_types, heads) if spec.edges else None
        self.hops = nn.Parameter(torch.empty(spec.max_hops, heads, heads)) if spec.edges else None

    def initialize(self, config, init) -> None:
        if self.hops is not None:
            init.normal_(self.hops, mean=0.0, std=config.initializer_range)

    def shared_tables(self) -> GraphormerPosition:
        return self

    def of_pairs(self, lengths: Tensor, paths: Tensor | None) -> Tensor:
        """lengths [B, T, T] as `spatial_pos`, paths [B, T, T, K] as `edge_paths` -> [B, H, T, T]"""
        self._check(lengths, paths)
        count = self.spec.num_distances
        rows = torch.where(lengths < 0, count - 1 - lengths, lengths.clamp(max=count - 1))
        bias = self.distances(rows)
        if self.edges is not None and self.hops is not None and paths is not None:
            # [K, edge types, H]: a hop is a table of its own
            tables = torch.matmul(weight_of(self.edges), weight_of(self, "hops"))
            paths = paths[..., : self.spec.max_hops]
            total = torch.zeros_like(bias)
            for hop in range(paths.shape[-1]):
                there = paths[..., hop] >= 0
                total = total + tables[hop][paths[..., hop].clamp(min=0)] * there[..., None]
            bias = bias + total / (paths >= 0).sum(-1, keepdim=True).clamp(min=1)
        return bias.permute(0, 3, 1, 2)

    def of_path(self, distance: Tensor) -> Tensor:
        """distance [n] between tokens of a text, a graph in which each is a neighbor of the next, by edges of type 0
        -> [1, H, n]"""
        steps = distance.abs()
        bias = self.distances(steps.clamp(max=self.spec.num_distances - 1))
        if self.edges is not None and self.hops is not None:
            hops = (weight_of(self.edges)[0] @ weight_of(self, "hops")).cumsum(0)  # [K, H]: sums over the first hops
            counts = steps.clamp(max=self.spec.max_hops)
            means = hops[(counts - 1).clamp(min=0)] / counts.clamp(min=1)[:, None]
            bias = bias + means * (counts > 0)[:, None]
        return bias.t()[None]

    def _check(self, lengths: Tensor, paths: Tensor | None) -> None:
        if lengths.ndim != 3 or lengths.shape[1] != lengths.shape[2]:
            raise ValueError(
                f"`spatial_pos` must be [batch, length, length], the path lengths of all pairs of tokens, got"
                f" {list(lengths.shape)}."
            )
        if paths is not None and (paths.ndim != 4 or paths.shape[:3] != lengths.shape):
            raise ValueError(
                f"`edge_paths` must be [batch, length, length, hops] like `spatial_pos` {list(lengths.shape)}, got"
                f" {list(paths.shape)}."
            )
        if not can_inspect():
            return
        if lengths.numel() and int(lengths.min()) < GRAPH_TOKEN:
            raise ValueError(
                f"`spatial_pos` holds path lengths, {UNREACHABLE} where there is no path and {GRAPH_TOKEN} for pairs"
                f" with the graph token, got {int(lengths.min())}."
            )
        if paths is not None and paths.numel() and int(paths.max()) >= self.spec.num_edge_types:
            raise ValueError(
                f"`edge_paths` holds edge type {int(paths.max())}, but this graphormer has {self.spec.num_edge_types};"
                " build it with more `num_edge_types`."
            )


class GraphormerTerms(PositionTerms):
    """score_ij += b[SPD(i, j)] + 1 / L sum_{n <= L} x_{e_n} W_n, e_1 ... e_L the edges of a shortest path from i to j,
    as far as there are L <= K of them; pairs with the graph token get t instead (Ying et al. 2021, arXiv 2106.05234,
    eqs. 6 and 7, with a matrix for each hop as in the released code).

    All layers add the same, which is made once per call: [B, H, T, T], or for texts a number for each distance.
    """

    def prepare(self, context: Call) -> None:
        if context.state(GraphTerms) is not None:
            return
        position: GraphormerPosition = context.prepared(PositionTables).module
        lengths, tokens = context.inputs.get("spatial_pos"), context.key_index.shape[0]
        if lengths is not None:
            pairs = position.of_pairs(lengths, context.inputs.get("edge_paths"))
            if pairs.shape[-1] != tokens:
                raise ValueError(
                    f"`spatial_pos` {list(lengths.shape)} is not of the {tokens} tokens of this batch; give the path"
                    f" lengths of all pairs of them, [batch, {tokens}, {tokens}]."
                )
            context.start(GraphTerms(pairs=pairs))
        else:
            distance = distances_of_block(context, slice(None), tokens)
            context.start(GraphTerms(line=position.of_path(distance)))

    def score_terms(self, attention: Any, scale: float, context: Call) -> SelfAttentionTerms:
        terms = context.given(GraphTerms)
        if terms.line is not None:
            return BiasByDistance(scale, (terms.line[0],), context)
        return BiasOfGraphs(scale, (cast(Tensor, terms.pairs).transpose(0, 1),), context)


class BiasOfGraphs(SelfAttentionTerms):
    """A bias of all pairs, [H, B, T, T]: the only table."""

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        return tables[0][:, :, block.rows, : block.keys].transpose(0, 1).to(block.query.dtype).clone()

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        bias = tables[0].transpose(0, 1)  # [B, h, T, T]
        size = (*bias.shape[:2], *pairs.query_at.shape[2:], pairs.key_at.shape[-1])
        rows = pairs.query_at.unsqueeze(-1) * bias.shape[3] + pairs.key_at.unsqueeze(-2)
        found = bias.flatten(2).gather(2, rows.expand(size).flatten(2))
        return found.view(size).to(pairs.query.dtype)


@register("position", "graphormer")
class GraphormerSpec(PositionSpec):
    """Ying et al. 2021 (arXiv 2106.05234), spatial and edge encoding; the degrees of nodes are `id_tables` of the
    embedding.

    Model inputs: `spatial_pos` [B, T, T], shortest path lengths, -1 where there is no path and -2 for pairs with the
    graph token; `edge_paths` [B, T, T, K], types of the edges along such a path, -1 behind its end. Without them a
    text is a graph in which each token is a neighbor of the next.

    Args:
        num_distances: path lengths that are told apart; longer ones count as the longest.
        edges: whether edges count.
        num_edge_types: types of edges.
        max_hops: K, edges of a path that count.
    """

    summary = "scores get a number for the shortest path between two nodes, and one for its edges"
    acts = frozenset({"score_terms"})
    inputs = ("spatial_pos", "edge_paths")
    shares_tables = True

    num_distances: int = bounded(512, least=1)
    edges: bool = True
    num_edge_types: int = bounded(1536, least=1)
    max_hops: int = bounded(5, least=1)

    def check(self, config) -> None:
        if config.is_decoder:
            raise ValueError(
                "position 'graphormer' tells a node how far all others are, later ones too, so it only works in an"
                " encoder; give a decoder another position such as 't5_relative_bias'."
            )

    def shared_sizes(self, config) -> tuple:
        return (config.num_attention_heads,)

    def build(self, config, **where) -> GraphormerPosition:
        return GraphormerPosition(config, self)

    def build_terms(self, config, layer_idx: int) -> GraphormerTerms:
        return GraphormerTerms()
