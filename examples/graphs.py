# SPDX-License-Identifier: Apache-2.0
"""Graphs of two classes that path lengths alone tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hf_xformers.data.graphs import Graph


def ring_graphs(num_examples: int, nodes: int, node_types: Sequence[int] = (2,), seed: int = 0) -> list[Graph]:
    """Graphs of `nodes` nodes in which each has two neighbors: one ring (label 1) or two (label 0), by turns.

    Nodes come in random order and are of random types. All nodes have the same neighbourhood in every number of
    steps that is shorter than the rings, so that degrees and messages between neighbors do not tell the classes
    apart (they are equal for the 1-dimensional Weisfeiler-Leman test); path lengths do.

    Raises:
        ValueError: too few nodes for two rings.
    """
    if nodes < 6:
        raise ValueError(f"Two rings have at least 6 nodes, got {nodes}.")
    random, made = Random(seed), []
    for number in range(num_examples):
        label = 1 - number % 2
        first = nodes if label else random.randint(3, nodes - 3)
        order = random.sample(range(nodes), nodes)
        edges = []
        for ring in (order[:first], order[first:]):
            edges += [(ring[i - 1], ring[i]) for i in range(len(ring))]
        made.append(Graph(tuple(random.choices(list(node_types), k=nodes)), tuple(edges), label=label))
    return made
