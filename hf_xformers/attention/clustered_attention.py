# SPDX-License-Identifier: Apache-2.0
"""Clustered attention: queries that are alike share one row of attention, refined for the keys that matter most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..core.initialization import seeded_normal
from ..ops.bucketed.attention import clustered_attention
from ..ops.bucketed.kmeans import nearest_tokens
from ..ops.bucketed.query_clusters import QueryClusters, cluster_blocks, cluster_means, hashed_clusters
from ..ops.common.head_groups import over_head_groups
from ..ops.common.products import masked_softmax, wide_products
from ..ops.common.row_lookup import take_rows
from .shared.base import Attention
from .shared.multihead_block import masked_attention
from .shared.spec import AttentionSpec


class ClusteredAttention(Attention):
    """o_i = (A^c V)_{g(i)}, A^c = softmax(scale * Q^c K^T), Q^c_c the mean of the queries with g(i) = c.

    Vyas, Katharopoulos and Fleuret 2020 (arXiv 2007.04825), section 3.2. The `num_clusters` clusters of each head and
    text come from k-means of the queries' sign hashes ([`hashed_clusters`]); they are constants, and gradients flow
    through the means. Neither other rows nor padding change them. The hash planes are a buffer, drawn from
    `hash_seed`, so that evaluation is deterministic.

    Time O(T C (bits * iterations + d)) per head, memory O(T (C + d)).
    """

    spec: ClusteredSpec
    planes: Tensor

    def __init__(self, config, spec: ClusteredSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        self.register_buffer("planes", self.draw_planes())

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.copy_(self.planes, self.draw_planes())

    def draw_planes(self) -> Tensor:
        """[bits, d + 1], the last column for the constant 1."""
        key = ("clustered_attention", self.spec.hash_seed, self.layer_idx)
        planes = seeded_normal((self.spec.hash_bits, self.head_dim + 1), *key)
        if not self.spec.hash_bias:
            planes[:, -1] = 0.0
        return planes

    def cluster(self, query: Tensor, mask: Tensor | None) -> QueryClusters:
        """The clusters of queries [B, H, T, d]."""
        return hashed_clusters(query, self.planes, self.spec.num_clusters, self.spec.lloyd_iterations, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        key, value, mask = self.repeated(key), self.repeated(value), context.padding_mask
        found = self.cluster(query, mask)
        means = cluster_means(query, found, mask)
        if self.wants_weights(context):
            real = query.new_ones(query.shape[0], query.shape[2], dtype=torch.bool) if mask is None else mask
            weights = self.matrix(query, key, means, found, real).to(query.dtype)
            return (F.dropout(weights, self.dropout_now) @ value).transpose(1, 2), weights
        return self.by_cluster(query, key, value, means, found, mask).transpose(1, 2), None

    def by_cluster(
        self, query: Tensor, key: Tensor, value: Tensor, means: Tensor, found: QueryClusters, mask: Tensor | None
    ) -> Tensor:
        """[B, H, T, d], of means [B, H, C, d] and clusters of the queries."""
        output, _ = masked_attention(means.to(key.dtype), key, value, mask, self.scaling, self.dropout_now)
        return take_rows(output.transpose(1, 2), found.labels)

    def matrix(self, query: Tensor, key: Tensor, means: Tensor, found: QueryClusters, real: Tensor) -> Tensor:
        """The attention matrix [B, H, T, T] that this is."""
        shared = masked_softmax(wide_products(means.to(key.dtype), key) * self.scaling, real[:, None, None])
        return shared.gather(2, found.labels[..., None].expand(*found.labels.shape, key.shape[2]))


class ImprovedClusteredAttention(ClusteredAttention):
    """A_ij = m_c softmax_{j in I_c}(scale * q_i k_j) for the keys I_c, and A^c_cj for all others, c = g(i).

    Vyas, Katharopoulos and Fleuret 2020 (arXiv 2007.04825), section 3.3: I_c are the `topk` keys with the largest
    scores of the cluster's mean, m_c is the weight A^c gives them together, which is divided anew for each query. The
    weights are never farther from softmax attention than those of clustered attention.

    Queries are laid out in blocks of one cluster, each of which meets the keys of its cluster alone. Time O(T k d)
    next to clustered attention, whose scores of a few heads at a time are made again in the backward pass.
    """

    spec: ImprovedClusteredSpec

    @torch.no_grad()
    def top(self, means: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The keys I_c [B, H, C, k] and which of these are used."""
        return nearest_tokens(self.scores(means, key).mT, self.spec.topk, mask)

    def scores(self, means: Tensor, key: Tensor) -> Tensor:
        """[B, H, C, S]"""
        return wide_products(means.to(key.dtype), key) * self.scaling

    def by_cluster(
        self, query: Tensor, key: Tensor, value: Tensor, means: Tensor, found: QueryClusters, mask: Tensor | None
    ) -> Tensor:
        places, used = self.top(means, key, mask)

        def by_mean(means: Tensor, key: Tensor, value: Tensor, places: Tensor, used: Tensor | None) -> Tensor:
            """What the means read of all other keys, and m behind it, [B, h, C, d + 1]."""
            scores = self.scores(means, key)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
            shared = torch.softmax(scores, dim=-1)
            best = shared.gather(-1, places)
            best = best if used is None else best.masked_fill(~used, 0.0)
            rest = F.dropout(shared.scatter(-1, places, 0.0).to(value.dtype), self.dropout_now)
            return torch.cat([rest @ value, best.sum(-1, keepdim=True).to(value.dtype)], -1)

        read = over_head_groups(by_mean, means, key, value, places, used, random=self.dropout_now > 0)
        length, clusters = query.shape[2], found.number
        tokens, taken, cluster = cluster_blocks(found, _block_width(length, clusters), mask)
        keys = places.gather(2, cluster[..., None].expand(*cluster.shape, places.shape[-1]))
        valid = None if used is None else used.gather(2, cluster[..., None].expand_as(keys))
        near = clustered_attention(
            *(query, key, value, tokens, keys),
            query_valid=taken,
            key_valid=valid,
            scale=self.scaling,
            dropout=self.dropout_now,
        )
        rest, total = take_rows(read, found.labels).split([value.shape[-1], 1], dim=-1)
        output = rest + total * near
        return output if mask is None else output.masked_fill(~mask[:, None, :, None], 0.0)

    def matrix(self, query: Tensor, key: Tensor, means: Tensor, found: QueryClusters, real: Tensor) -> Tensor:
        places, used = self.top(means, key, real)
        shared = super().matrix(query, key, means, found, real)
        chosen = torch.zeros(*places.shape[:3], key.shape[2], dtype=torch.bool, device=key.device)
        chosen = chosen.scatter(-1, places, True if used is None else used)
        chosen = chosen.gather(2, found.labels[..., None].expand_as(shared))
        near = masked_softmax(wide_products(query, key) * self.scaling, chosen)
        mixed = torch.where(chosen, (shared * chosen).sum(-1, keepdim=True) * near, shared)
        return mixed.masked_fill(~real[:, None, :, None], 0.0)


def _block_width(length: int, clusters: int) -> int:
    """Queries of a block: a power of 2 near the mean size of a cluster, so that few places stay empty."""
    return min(max(1 << (length // clusters).bit_length() - 1, 8), 64)


@register("attention", "clustered_attention", aliases=("clustered",))
class ClusteredSpec(AttentionSpec):
    """
    Args:
        num_clusters: clusters C of the queries of a head (a shorter text has as many as tokens).
        hash_bits: bits of a query's hash.
        lloyd_iterations: steps of k-means.
        hash_bias: whether hash planes need not go through the origin.
        hash_seed: of the planes.
    """

    summary = "queries that are alike share one row of attention"
    head_options = frozenset({"norm"})
    why_not: ClassVar[Mapping[str, str]] = {
        "causal": "a query shares its row of attention with later ones, whose mean asks for all of them."
    }

    num_clusters: int = bounded(100, "clusters", least=1)
    hash_bits: int = bounded(63, least=1)
    lloyd_iterations: int = bounded(10, least=0)
    hash_bias: bool = True
    hash_seed: int = 0

    def build(self, config, **where) -> ClusteredAttention:
        return ClusteredAttention(config, self, **where)


@register("attention", "improved_clustered_attention", aliases=("improved_clustered",))
class ImprovedClusteredSpec(ClusteredSpec):
    """
    Args:
        num_clusters, hash_bits, lloyd_iterations, hash_bias, hash_seed: as for `clustered_attention`.
        topk: keys of a cluster that each of its queries weighs for itself (a shorter text: all of them).
    """

    summary = "clustered attention whose rows are made exact for the keys that matter most"

    topk: int = bounded(32, "top_k", least=1)

    def build(self, config, **where) -> ImprovedClusteredAttention:
        return ImprovedClusteredAttention(config, self, **where)
