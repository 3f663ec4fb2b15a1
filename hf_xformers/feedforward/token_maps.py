# SPDX-License-Identifier: Apache-2.0
"""Fixed maps from the words of a vocabulary to experts (Roller et al. 2021, arXiv 2106.04426, section 3.1)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_ROUNDS = 100
_ROWS = 4096  # whose distances to all centers are held at once


def balanced_map(counts: Sequence[float], num_experts: int) -> Tensor:
    """[V]: from the most frequent word on, each goes to the expert that has the least so far."""
    load = [(0.0, expert) for expert in range(num_experts)]
    table = [0] * len(counts)
    for token in sorted(range(len(counts)), key=lambda index: (-counts[index], index)):
        filled, expert = heapq.heappop(load)
        table[token] = expert
        heapq.heappush(load, (filled + counts[token], expert))
    return torch.tensor(table)


def k_means(vectors: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """vectors [V, d] -> the cluster [V] of each, 0 <= cluster < num_clusters: the one whose mean is nearest to it.

    Lloyd's algorithm until nothing moves, from starts that are drawn one after the other in proportion to the squared
    distance to the nearest one so far. A cluster that loses its last vector takes the one farthest from its center.

    Raises:
        ValueError: fewer different vectors than clusters.
    """
    vectors = vectors.detach().to("cpu", torch.float64)
    centres = vectors[torch.randint(len(vectors), (1,), generator=generator)]
    apart = (vectors - centres).square().sum(-1)
    while len(centres) < num_clusters:
        if not bool((apart > 0).any()):
            raise ValueError(
                f"{num_clusters} clusters need as many different vectors, and of the {len(vectors)} given only"
                f" {len(centres)} are; take fewer experts."
            )
        drawn = vectors[torch.multinomial(apart, 1, generator=generator)]
        centres = torch.cat((centres, drawn))
        apart = torch.minimum(apart, (vectors - drawn).square().sum(-1))
    clusters = torch.full((len(vectors),), -1)
    for _ in range(_MOST_ROUNDS):
        nearest = [torch.cdist(part, centres).min(-1) for part in vectors.split(_ROWS)]
        apart, found = torch.cat([part.values for part in nearest]), torch.cat([part.indices for part in nearest])
        sizes = torch.bincount(found, minlength=num_clusters)
        for empty in (sizes == 0).nonzero()[:, 0].tolist():
            far = int(torch.where(sizes[found] > 1, apart, -1.0).argmax())
            sizes[found[far]] -= 1
            found[far], apart[far], sizes[empty] = empty, 0.0, 1
        if torch.equal(found, clusters):
            break
        clusters = found
        centres = torch.zeros_like(centres).index_add_(0, clusters, vectors) / sizes[:, None]
    return clusters


def dispersed_map(clusters: Tensor, num_experts: int, generator: torch.Generator) -> Tensor:
    """clusters [V] -> experts [V]: the words of every cluster, in drawn order, dealt out to all experts in turn, from
    the one on where the cluster before ended. No expert has two words more of a cluster, or of all, than another."""
    shuffled = torch.randperm(len(clusters), generator=generator)
    order = shuffled[torch.sort(clusters[shuffled], stable=True).indices]
    table = torch.empty_like(clusters)
    table[order] = torch.arange(len(clusters)) % num_experts
    return table
