# SPDX-License-Identifier: Apache-2.0
"""Clusters of tokens by centroids that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.initialization import seeded_normal
from ...core.prepared import Prepared
from ...ops.bucketed.kmeans import ClusterSums, nearest_tokens, squared_distances
from ...ops.common.constants import constant
from ...ops.common.products import wide_products, widened
from ...ops.common.real_tokens import real_places
from .bucketed import Stage

_LEAST_COUNT = 1e-6  # of a centroid that lost all its vectors; keeps its place
_FIRST_STAGE = 64  # tokens; below, clusters of a few tokens would not be worth a stage of their own
_ROUNDING = 32  # of affinities, in units of the last place of their bound: what the products before them leave
_AFFINITIES_AT_ONCE = 1 << 21  # products of tokens with centroids: 8 MiB in float32


Places = tuple[Tensor, Tensor | None]


class Routes(Prepared):
    """What a forward pass decided: the centroids it used, and who is in which cluster.

    Args:
        query_labels, key_labels: [B, R, T], nearest centroids (keys: None when shared).
        query_places, key_places: the w nearest tokens of each centroid [B, R, K, w] by rising position, and which of
            these places are used.
        stage_labels: [B, R, stages, T], the nearest of the centroids of each stage, where tokens choose.
    """

    centroids: Tensor
    query_labels: Tensor
    key_labels: Tensor | None = None
    query_places: Places | None = None
    key_places: Places | None = None
    stage_labels: Tensor | None = None


class NothingLearnt(Prepared):
    """In a call without gradients, such as a reference's or one that writes a text, centroids stay where they are."""


def unit_length(vectors: Tensor) -> Tensor:
    """LayerNorm over the last axis without scale or bias."""
    return F.layer_norm(vectors, vectors.shape[-1:])


class LearnsCentroids(nn.Module):
    """An attention with centroids by online k-means: who is in which cluster, and where the centroids go."""

    spec: Any
    centroids: Tensor
    counts: Tensor
    routed: int
    clusters: int
    head_dim: int
    layer_idx: int
    is_causal: bool
    stages: list[Stage]
    stage_clusters: list[int]

    def draw_centroids(self) -> Tensor:
        """[routed heads, clusters, d]: random directions, the same in every process."""
        shape = (self.routed, self.clusters, self.head_dim)
        return unit_length(seeded_normal(shape, "routing", self.layer_idx))

    @property
    def chooses(self) -> bool:
        """Whether clusters choose tokens (balanced) instead of tokens choosing clusters."""
        return not self.is_causal or self.spec.causal_form == "paper"

    def _stages(self, config) -> tuple[list[Stage], list[int]]:
        """Of a strictly causal model: the stages, and the number of clusters of each."""
        spec, ends = self.spec, [config.max_position_embeddings]
        if spec.num_clusters is None or spec.window_size is None:
            while ends[0] > _FIRST_STAGE:
                ends.insert(0, max(-(-ends[0] // 4), _FIRST_STAGE))
        counts = [min(spec.clusters(end), self.clusters) for end in ends]
        begins = [0, *ends[:-1]]
        return [Stage(begin, spec.window(end) - 1) for begin, end in zip(begins, ends, strict=True)], counts

    def nearest(self, vectors: Tensor) -> Tensor:
        """vectors [B, R, T, d] -> numbers of the nearest centroids of each stage [B, R, stages, T]."""
        return self._by_stage(wide_products(vectors, self.centroids))

    def _by_stage(self, affinity: Tensor) -> Tensor:
        """[B, R, T, K] -> [B, R, stages, T]."""
        return torch.stack([affinity[..., :count].argmax(-1) for count in self.stage_clusters], dim=2).int()

    @torch.no_grad()
    def route(self, query: Tensor, key: Tensor | None, valid: Tensor | None) -> Routes:
        """Assigns normalized queries [B, R, T, d] (and keys, unless shared) to clusters."""
        centroids = self.centroids.clone() if self.training else self.centroids
        if not self.chooses:
            stage_labels = torch.cat([self._by_stage(part) for part, _ in self._affinities(query, centroids)], dim=1)
            return Routes(centroids, self._of_own_stage(stage_labels, valid), stage_labels=stage_labels)
        labels, places = self._chosen(query, centroids, valid)
        if key is None:
            return Routes(centroids, labels, None, places, places)
        key_labels, key_places = self._chosen(key, centroids, valid)
        return Routes(centroids, labels, key_labels, places, key_places)

    def _of_own_stage(self, labels: Tensor, valid: Tensor | None) -> Tensor:
        """Labels by stage [B, R, stages, T] -> of the stage that each token stands in, [B, R, T], in a whole text."""
        place = torch.arange(labels.shape[3], device=labels.device)[None] if valid is None else real_places(valid)
        begins = constant([stage.begin for stage in self.stages[1:]], labels.device)
        number = torch.bucketize(place, begins, right=True)[:, None, None]
        return labels.gather(2, number.expand(*labels.shape[:2], 1, -1))[:, :, 0]

    def _chosen(
        self, vectors: Tensor, centroids: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """vectors [B, R, T, d] -> nearest centroids [B, R, T], and the tokens that centroids choose."""
        spec, length = self.spec, vectors.shape[2]
        exporting = torch.compiler.is_exporting()  # a graph for every length has room for the most clusters
        clusters = self.clusters if exporting else min(spec.clusters(length), self.clusters)
        centroids = centroids[:, :clusters]
        width, absent, widths = spec.window_size or -(-length // clusters), None, None
        by_row = spec.num_clusters is None or spec.window_size is None
        if by_row and (valid is not None or exporting):
            valid = torch.ones_like(vectors[:, 0, :, 0], dtype=torch.bool) if valid is None else valid
            # The square root rises in steps: a shorter text can have larger clusters, by less than one token.
            most = 1 if spec.num_clusters else clusters
            width = spec.window_size or torch.sym_max(most, -(-length // self.clusters))
            counts, widths = spec.by_row(valid.sum(-1), self.clusters)
            absent = (torch.arange(centroids.shape[1], device=valid.device) >= counts[:, None])[:, None]  # [B, 1, K]
        labels, places = [], []
        used: list[Any] = []
        for affinity, tolerance in self._affinities(vectors, centroids):
            near = affinity if absent is None else affinity.masked_fill(absent[:, :, None], -torch.inf)
            labels.append(near.argmax(-1))
            found = nearest_tokens(affinity, width, valid, widths, tolerance)
            places.append(found[0])
            used.append(found[1] if absent is None else cast(Tensor, found[1]) & ~absent[..., None])
        return torch.cat(labels, dim=1), (torch.cat(places, dim=1), None if valid is None else torch.cat(used, dim=1))

    def _affinities(self, vectors: Tensor, centroids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """vectors [B, R, T, d] with centroids [R, K, d], [B, some heads, T, K] at a time, and what rounding may make
        of equal ones, [some heads, K, 1]: the vectors have length sqrt(d)."""
        vectors, centroids = widened(vectors, centroids)
        heads, rounding = self.routed, _ROUNDING * torch.finfo(vectors.dtype).eps * self.head_dim**0.5
        if not torch.compiler.is_compiling():  # with as many clusters as sqrt(T) affinities would outgrow all else
            heads = max(_AFFINITIES_AT_ONCE // max(vectors[:, 0, :, 0].numel() * centroids.shape[1], 1), 1)
        for some, own in zip(vectors.split(heads, dim=1), centroids.split(heads)):
            yield wide_products(some, own), rounding * torch.linalg.vector_norm(own, dim=-1)[..., None]

    @torch.no_grad()
    def learn(self, clusters: list[ClusterSums]) -> None:
        """Moves the centroids towards the vectors nearest to them; one step per forward pass, the same in all
        processes."""
        precise = torch.promote_types(self.centroids.dtype, torch.float32)
        sums = torch.zeros_like(self.centroids, dtype=precise)
        counts = torch.zeros_like(self.counts, dtype=precise)
        for found in clusters:
            sums += found.sums.to(precise)
            counts += found.counts.to(precise)
        if dist.is_available() and dist.is_initialized():
            both = torch.cat([sums, counts[..., None]], dim=-1)
            dist.all_reduce(both)
            sums, counts = both[..., :-1], both[..., -1]
        decay = self.spec.ema_decay
        old = decay * self.counts.to(precise)
        total = old + (1 - decay) * counts
        moved = (old[..., None] * self.centroids + (1 - decay) * sums) / total.clamp(min=_LEAST_COUNT)[..., None]
        # One without vectors stays where it is, also when its weight has decayed to nothing.
        self.centroids.copy_(torch.where(counts[..., None] > 0, moved, self.centroids.to(precise)))
        self.counts.copy_(total.clamp(min=_LEAST_COUNT))

    def commitment(self, centroids: Tensor, clusters: list[ClusterSums], valid: Tensor | None) -> Tensor:
        """beta * mean squared distance between vectors and their centroids [R, K, d], over real tokens."""
        losses = []
        for found in clusters:
            total = squared_distances(found, centroids)
            tokens = found.vectors.shape[0] // self.routed if valid is None else valid.sum().clamp(min=1)
            losses.append(total / (tokens * self.routed * self.head_dim))
        return self.spec.commitment_weight * torch.stack(losses).mean()
