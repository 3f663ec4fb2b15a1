# SPDX-License-Identifier: Apache-2.0
"""Graphs as model inputs: nodes are tokens, and all pairs of them have a path length and the edges of such a path."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.graph_inputs import GRAPH_TOKEN, NO_EDGE, UNREACHABLE


@dataclass(frozen=True)
class Graph:
    """
    Args:
        nodes: ids of node types, in the vocabulary of the model.
        edges: pairs of places in `nodes`.
        edge_types: one for each edge (none: all 0).
        label: the graph's class, or None.
        directed: an edge leads from its first node alone.
    """

    nodes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    edge_types: tuple[int, ...] = ()
    label: int | None = None
    directed: bool = False

    def __post_init__(self) -> None:
        count = len(self.nodes)
        for edge in self.edges:
            if not all(0 <= node < count for node in edge):
                raise ValueError(f"A graph of {count} nodes has edges between them, from 0 on, got {edge}.")
        if self.edge_types and len(self.edge_types) != len(self.edges):
            raise ValueError(
                f"`edge_types` has one number for each of {len(self.edges)} edges, or is empty, got"
                f" {len(self.edge_types)}."
            )

    def neighbours(self) -> list[dict[int, int]]:
        """For each node: where its edges lead, and their types; in the order of places."""
        found: list[dict[int, int]] = [{} for _ in self.nodes]
        for (start, end), kind in zip(self.edges, self.edge_types or (0,) * len(self.edges), strict=True):
            found[start].setdefault(end, kind)
            if not self.directed:
                found[end].setdefault(start, kind)
        return [dict(sorted(each.items())) for each in found]


def shortest_paths(graph: Graph, max_hops: int) -> tuple[Tensor, Tensor]:
    """Path lengths [n, n], [`UNREACHABLE`] where there is none, and the types of the first `max_hops` edges of one
    shortest path [n, n, max_hops], [`NO_EDGE`] behind its end.

    By breadth-first search from every node; of several shortest paths the one found first counts.
    """
    count, neighbours = len(graph.nodes), graph.neighbours()
    lengths = torch.full((count, count), UNREACHABLE)
    paths = torch.full((count, count, max_hops), NO_EDGE)
    for source in range(count):
        reached: dict[int, tuple[int, ...]] = {source: ()}
        queue = deque((source,))
        while queue:
            node = queue.popleft()
            edges = reached[node]
            lengths[source, node] = len(edges)
            paths[source, node, : len(edges)] = torch.tensor(edges[:max_hops], dtype=torch.long)
            for other, kind in neighbours[node].items():
                if other not in reached:
                    reached[other] = (*edges, kind)
                    queue.append(other)
    return lengths, paths


@dataclass
class GraphCollator:
    """[`Graph`] objects -> a batch for a model with position 'graphormer' and `id_tables` for degrees.

    Every graph gets a token of its own before its nodes (`graph_token_id`), a neighbor of none, whose pairs have the
    path length [`GRAPH_TOKEN`]; classifiers read it. Gives `input_ids` and `attention_mask` [B, T], `in_degree` and
    `out_degree` [B, T] (0 for the graph's token and for padding), `spatial_pos` [B, T, T], `edge_paths`
    [B, T, T, max_hops], and `labels` [B] where graphs have one.

    max_degree: the largest number of the degrees' tables; higher ones count as that.
    """

    graph_token_id: int
    pad_token_id: int = 0
    max_hops: int = 5
    max_degree: int = 511

    def __call__(self, graphs: Sequence[Graph]) -> dict[str, Tensor]:
        size = (len(graphs), 1 + max(len(graph.nodes) for graph in graphs))
        batch = {
            "input_ids": torch.full(size, self.pad_token_id),
            "attention_mask": torch.zeros(size, dtype=torch.long),
            "in_degree": torch.zeros(size, dtype=torch.long),
            "out_degree": torch.zeros(size, dtype=torch.long),
            "spatial_pos": torch.full((*size, size[1]), UNREACHABLE),
            "edge_paths": torch.full((*size, size[1], self.max_hops), NO_EDGE),
        }
        for row, graph in enumerate(graphs):
            self._fill({name: tensor[row] for name, tensor in batch.items()}, graph)
        labels = [graph.label for graph in graphs]
        if None not in labels:
            batch["labels"] = torch.tensor(labels)
        return batch

    def _fill(self, row: dict[str, Tensor], graph: Graph) -> None:
        end, neighbours = 1 + len(graph.nodes), graph.neighbours()
        row["input_ids"][:end] = torch.tensor((self.graph_token_id, *graph.nodes))
        row["attention_mask"][:end] = 1
        leaving = [len(each) for each in neighbours]
        arriving = [sum(node in each for each in neighbours) for node in range(len(graph.nodes))]
        row["out_degree"][1:end] = torch.tensor(leaving, dtype=torch.long).clamp(max=self.max_degree)
        row["in_degree"][1:end] = torch.tensor(arriving, dtype=torch.long).clamp(max=self.max_degree)
        lengths, paths = shortest_paths(graph, self.max_hops)
        row["spatial_pos"][1:end, 1:end], row["edge_paths"][1:end, 1:end] = lengths, paths
        row["spatial_pos"][0, :end] = row["spatial_pos"][:end, 0] = GRAPH_TOKEN
