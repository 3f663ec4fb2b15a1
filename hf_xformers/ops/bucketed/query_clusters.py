# SPDX-License-Identifier: Apache-2.0
"""Queries in clusters: which belongs to which, by k-means among hashes; their means; and blocks of one cluster each.

Vyas, Katharopoulos and Fleuret 2020 (arXiv 2007.04825), section 3.2. Every row of a batch and every head is clustered
by itself, on its real tokens alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.products import wide_products, widened
from ..common.real_tokens import real_first
from ..common.row_lookup import sum_rows


class QueryClusters(NamedTuple):
    """labels: the cluster of each token [B, H, T], `number` clusters; counts: their tokens [B, H, C], of which padding
    is none."""

    labels: Tensor
    counts: Tensor

    @property
    def number(self) -> int:
        return self.counts.shape[-1]


@torch.no_grad()
def hashed_clusters(
    query: Tensor, planes: Tensor, clusters: int, iterations: int, mask: Tensor | None
) -> QueryClusters:
    """Lloyd's k-means of the sign hashes of queries in Hamming space.

    Bit r of a query is the sign of (q, 1) p_r. Clusters start at real tokens that stand at equal distances in the
    text, `clusters` of them or as many as there are; a bit of a centroid is that of most of its members, and stays
    where they are equal; a query goes to the nearest centroid, of equals to the first.

    Args:
        query: [B, H, T, d].
        planes: p [bits, d + 1].
        clusters, iterations: how many of them.
        mask: [B, T], True for a real token.
    """
    (batch, heads, length, width), (query, planes) = query.shape, widened(query, planes)
    bits, clusters = planes.shape[0], min(clusters, length)
    side = wide_products(query, planes[:, :width]) + planes[:, width]
    signs = torch.where(side > 0, 1.0, -1.0).to(query.dtype)
    if mask is None:
        start = torch.arange(clusters, device=query.device) * length // clusters
        start = start.expand(batch, clusters)
        absent = None
    else:
        signs = signs * mask[:, None, :, None]
        count = mask.sum(-1, keepdim=True)
        used = count.clamp(1, clusters)
        number = torch.arange(clusters, device=query.device)
        start = real_first(mask).gather(1, (number * count // used).clamp(max=length - 1))
        absent = (number >= used)[:, None, None]  # [B, 1, 1, C]
    centroids = signs.gather(2, start[:, None, :, None].expand(-1, heads, -1, bits))
    for _ in range(iterations):
        labels = _nearest(signs, centroids, absent)
        sums = sum_rows(signs, labels, clusters)
        centroids = torch.where(sums == 0, centroids, sums.sign())
    labels = _nearest(signs, centroids, absent)
    ones = (
        signs.new_ones(batch, heads, length, 1)
        if mask is None
        else mask[:, None, :, None].to(signs).expand_as(signs[..., :1])
    )
    return QueryClusters(labels, sum_rows(ones, labels, clusters)[..., 0].long())


def _nearest(signs: Tensor, centroids: Tensor, absent: Tensor | None) -> Tensor:
    """[B, H, T]; the Hamming distance of two hashes is (bits - their product) / 2, and products are whole numbers."""
    affinity = signs @ centroids.mT
    return (affinity if absent is None else affinity.masked_fill(absent, -torch.inf)).argmax(-1)


def cluster_means(x: Tensor, found: QueryClusters, mask: Tensor | None) -> Tensor:
    """Means [B, H, C, d] of the real tokens x [B, H, T, d] of each cluster, in float32 at least; 0 of none."""
    (x,) = widened(x)
    if mask is not None:
        x = x.masked_fill(~mask[:, None, :, None], 0.0)
    return sum_rows(x, found.labels, found.number) / found.counts.clamp(min=1)[..., None]


@torch.no_grad()
def cluster_blocks(found: QueryClusters, width: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of each cluster cut into blocks of `width`: T / width + C blocks always suffice.

    Returns:
        Their tokens [B, H, N, width], which of these places are used, and the cluster of each block [B, H, N].
    """
    labels, counts = found
    length, clusters = labels.shape[-1], found.number
    if mask is not None:
        labels = labels.masked_fill(~mask[:, None], clusters)  # behind all others
    order = labels.argsort(dim=-1, stable=True)
    blocks = -(-counts // width)
    ends = blocks.cumsum(-1)
    number = torch.arange(length // width + clusters, device=labels.device)
    cluster = torch.searchsorted(ends, number.expand(*ends.shape[:-1], -1).contiguous(), right=True)
    inside = cluster.clamp(max=clusters - 1)
    within = number - (ends - blocks).gather(-1, inside)  # which block of its cluster
    place = within[..., None] * width + torch.arange(width, device=labels.device)
    used = (place < counts.gather(-1, inside)[..., None]) & (cluster < clusters)[..., None]
    first = F.pad(counts.cumsum(-1), (1, 0)).gather(-1, inside)
    tokens = (first[..., None] + place).clamp(max=length - 1).flatten(2)
    return order.gather(-1, tokens).view_as(place), used, inside
