# SPDX-License-Identifier: Apache-2.0
"""T5's relative position bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..core.components import bounded, register
from .base import Position, PositionSpec, ScoreBias


def relative_buckets(distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance key - query (Raffel et al. 2020, section 2.1; the released code's arithmetic).

    Half of a side's buckets are exact distances; the others grow logarithmically up to `max_distance`, beyond which
    all distances share the last one. Bidirectional: half of the buckets for each direction. Causal: later keys count
    as 0.
    """
    bucket = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (distance > 0).to(distance.dtype) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # The logarithm is only used where distance >= exact; the clamp keeps it finite elsewhere.
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).to(distance.dtype)
    return bucket + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


class BucketedBias(nn.Module):
    """b[h, bucket(j - i)], a table [buckets, H]."""

    def __init__(self, config, spec: T5RelativeBiasSpec):
        super().__init__()
        self.spec, self.bidirectional = spec, not config.is_decoder
        self.table = nn.Embedding(spec.num_buckets, config.num_attention_heads)

    def by_distance(self, distance: Tensor) -> Tensor:
        """distance (key - query) [...] -> [H, ...]."""
        buckets = relative_buckets(
            distance,
            bidirectional=self.bidirectional,
            num_buckets=self.spec.num_buckets,
            max_distance=self.spec.max_distance,
        )
        return self.table(buckets).movedim(-1, 0)

    def initialize(self, config, init) -> None:
        std = config.initializer_range
        if config.initializer == "t5":
            std = config.initializer_factor * config.hidden_size**-0.5
        init.normal_(self.table.weight, mean=0.0, std=std)


class T5RelativeBias(BucketedBias, Position, ScoreBias):
    """score_ij += b[h, bucket(j - i)], one table for all layers of the tower."""

    relative = True

    def score_bias(self) -> T5RelativeBias:
        return self

    def block(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        """query_index [..., Tq], key_index [..., Tk] -> [..., H, Tq, Tk]."""
        return self.by_distance(key_index.unsqueeze(-2) - query_index.unsqueeze(-1)).movedim(0, -3)


@register("position", "t5_relative_bias", aliases=("t5_bias",))
class T5RelativeBiasSpec(PositionSpec):
    """num_buckets: rows of the table (even in an encoder). max_distance: tokens from which all distances share a
    row."""

    summary = "learned score bias by bucketed distance"
    acts = frozenset({"score_bias"})
    supports = frozenset({"neighbors"})

    num_buckets: int = bounded(32, least=2)
    max_distance: int = 128

    def check_fields(self) -> None:
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"{self.type} needs `max_distance` above half of `num_buckets` ({self.num_buckets // 2}), "
                f"got {self.max_distance}."
            )

    def check(self, config) -> None:
        if not config.is_decoder and (self.num_buckets % 2 or self.num_buckets < 4):
            raise ValueError(
                f"{self.type} in an encoder splits `num_buckets` between two directions: it must be even and at "
                f"least 4, got {self.num_buckets}."
            )

    def build(self, config, **where) -> Position:
        return T5RelativeBias(config, self)
