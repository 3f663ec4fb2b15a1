# SPDX-License-Identifier: Apache-2.0
"""Tokens and the centroids of k-means near to them: who is nearest, what clusters hold, and how far it is.

Names: R heads with centroids of their own, K centroids per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.row_lookup import rows_of_tokens


def nearest_tokens(
    affinity: Tensor,
    width: int,
    padding_mask: Tensor | None,
    widths: Tensor | None = None,
    tolerance: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """The real tokens with the largest affinity to each centroid.

    Args:
        affinity: [B, R, T, K].
        width: tokens of a centroid, or T where there are fewer.
        padding_mask: [B, T], True for a real token.
        widths: [B], tokens of a centroid by row, 1 to `width`, of which the rest is not used (only with
            `padding_mask`).
        tolerance: broadcastable to [B, R, K, 1]. Affinities that are so close to the least one that is taken count as
            equal to it: the last bits of a product depend on where in a batch its row stands.

    Returns:
        Their places in order, [B, R, K, width], and which of them are used (`None`: all). Among equal tokens the
        earlier ones are taken, wherever padding stands; where affinities are not numbers the places mean nothing.
    """
    affinity = affinity.mT
    if padding_mask is not None:
        affinity = affinity.masked_fill(~padding_mask[:, None, None], -torch.inf)
    width = min(width, affinity.shape[-1])
    if widths is not None:
        if padding_mask is None:
            raise ValueError("`widths` are numbers of real tokens by row; give `padding_mask` with them.")
        return _nearest_by_row(affinity, width, padding_mask, widths[:, None, None, None].clamp(max=width), tolerance)
    least = affinity.topk(width, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    near = affinity >= least - tolerance
    places = _counted(near, width)  # sorting all of them would take three times as long
    if places is None:
        above = affinity > least + tolerance
        equal = near & ~above
        room = width - above.sum(-1, keepdim=True)
        places = _in_order(above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room)), width)
    if padding_mask is None:
        return places, None
    return places, padding_mask[:, None, None].expand_as(affinity).gather(-1, places)


def _nearest_by_row(
    affinity: Tensor, width: int, padding_mask: Tensor, widths: Tensor, tolerance: Tensor | float
) -> tuple[Tensor, Tensor]:
    """[`nearest_tokens`] of affinities [B, R, K, T], with a number of tokens for each row, [B, 1, 1, 1]."""
    falling = affinity.topk(width, dim=-1).values
    least = falling.gather(-1, (widths - 1).expand(*falling.shape[:3], 1))
    above = affinity > least + tolerance
    equal = (affinity >= least - tolerance) & ~above
    room = widths - above.sum(-1, keepdim=True)
    places = _in_order(above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room)), width)
    used = torch.arange(width, device=affinity.device) < widths
    return places, used & padding_mask[:, None, None].expand_as(affinity).gather(-1, places)


def _counted(chosen: Tensor, width: int) -> Tensor | None:
    """chosen [..., T] -> the places that are, in order, [..., width]; None unless there are as many in all as in rows
    of `width`, and where they would have to be waited for."""
    if chosen.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    places = chosen.flatten().nonzero()  # three times as fast as sorting them out
    if places.shape[0] * chosen.shape[-1] != chosen.numel() * width:
        return None
    return (places % chosen.shape[-1]).view(*chosen.shape[:-1], width)


def _in_order(chosen: Tensor, width: int) -> Tensor:
    """chosen [..., T], `width` of each row -> their places in order, [..., width]. Where scores are not numbers
    nothing is chosen, and the places mean nothing."""
    places = _counted(chosen, width)
    if places is not None:
        return places
    places = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.int32)
    places = torch.where(chosen, places, chosen.shape[-1]).topk(width, dim=-1, largest=False).values
    return places.clamp(max=chosen.shape[-1] - 1).long()


class ClusterSums(NamedTuple):
    """What clusters hold. vectors [B T R, d], zeros where there is no token; which of the clusters [R K] they are in,
    [B T R]; their sums [R, K, d] and numbers [R, K]."""

    vectors: Tensor
    cluster: Tensor
    sums: Tensor
    counts: Tensor


def sums_of_clusters(vectors: Tensor, labels: Tensor, clusters: int, padding_mask: Tensor | None) -> ClusterSums:
    """vectors [B, R, T, d] and the numbers of the clusters nearest to them [B, R, T] -> what `clusters` per head hold
    of the real tokens, in float32 at least. Sums and numbers have no gradient."""
    batch, heads, length, width = vectors.shape
    vectors = rows_of_tokens(vectors.to(torch.promote_types(vectors.dtype, torch.float32)))
    cluster = (labels.long().transpose(1, 2) + torch.arange(heads, device=labels.device) * clusters).flatten()
    ones = vectors.new_ones(cluster.shape)
    if padding_mask is not None:
        real = padding_mask[..., None].expand(batch, length, heads).flatten()
        vectors, ones = vectors.masked_fill(~real[:, None], 0.0), real.to(ones)
    sums = vectors.new_zeros(heads * clusters, width).index_add(0, cluster, vectors.detach())
    counts = vectors.new_zeros(heads * clusters).index_add(0, cluster, ones)
    return ClusterSums(vectors, cluster, sums.view(heads, clusters, -1), counts.view(heads, clusters))


def squared_distances(found: ClusterSums, centroids: Tensor) -> Tensor:
    """sum |x - mu|^2 over real tokens x and their centroids mu, of centroids [R, K, d] that have no gradient."""
    return _SquaredDistances.apply(found.vectors, centroids.to(found.sums.dtype), *found[1:])


class _SquaredDistances(torch.autograd.Function):
    """= sum |x|^2 - 2 sum_c mu_c sum_c x + sum_c n_c |mu_c|^2, so that the forward pass makes nothing as large as the
    vectors. A vector of zeros that stands for no token is not counted, and what gives it hands no gradient on."""

    @staticmethod
    def forward(ctx, vectors: Tensor, centroids: Tensor, cluster: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, centroids, cluster)
        flat = vectors.flatten()
        return torch.dot(flat, flat) - 2 * (sums * centroids).sum() + (counts * centroids.square().sum(-1)).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        vectors, centroids, cluster = ctx.saved_tensors
        return 2 * grad * (vectors - centroids.flatten(0, 1).index_select(0, cluster)), None, None, None, None
