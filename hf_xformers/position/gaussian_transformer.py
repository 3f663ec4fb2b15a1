# SPDX-License-Identifier: Apache-2.0
"""The Gaussian Transformer's prior: scores fall with the square of the distance, at a rate that every head learns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..core.precision import Float32Module
from ..core.reading_weights import weight_of
from ..core.weight_decay import Undecayed
from .base import Position, PositionSpec, PositionTerms
from .distances import distances_of_block
from .score_terms import BiasByDistance, SelfAttentionTerms


class GaussianTerms(Float32Module, Undecayed, PositionTerms):
    """score_ij += -|w_h (i - j)^2 + b_h|, w_h > 0 and b_h < 0 learned for each head of each layer (or 0 without
    `offset`).

    Guo, Zhang and Liu 2019 (AAAI 33, pages 6489-6496): a Gaussian of the distance as a factor on every weight, with
    b to make a token's own weight smaller. For b < 0 the term is largest, zero, at the distance sqrt(-b / w), a ring
    around the token. w = softplus of a parameter, b = -softplus of another; both stay in float32, as they are
    multiplied by squares of distances, and out of weight decay. No token is ever out of reach: a score falls, but
    stays finite.
    """

    undecayed = ("raw_scale", "raw_offset")
    readers = ("by_distance",)

    def __init__(self, config, spec: GaussianTransformerSpec):
        super().__init__()
        self.spec = spec
        rows = config.num_attention_heads if spec.per_head else 1
        self.heads_count = config.num_attention_heads
        self.raw_scale = nn.Parameter(torch.empty(rows))
        self.raw_offset = nn.Parameter(torch.empty(rows)) if spec.offset else None

    def initialize(self, config, init) -> None:
        init.constant_(self.raw_scale, _inverse_softplus(self.spec.first_scale(config)))
        if self.raw_offset is not None:
            init.constant_(self.raw_offset, _inverse_softplus(-self.spec.first_offset(config)))

    def by_distance(self, distance: Tensor) -> Tensor:
        """distance (key - query) [n] -> -|w distance^2 + b|, [H, n]"""
        scale = F.softplus(weight_of(self, "raw_scale"))[:, None]
        squares = distance.to(scale.dtype).square()
        # w d^2 + b changes its sign: what is below zero there is the ring's inside.
        value = scale * squares
        if self.raw_offset is not None:
            value = value - F.softplus(weight_of(self, "raw_offset"))[:, None]
        return -value.abs().expand(self.heads_count, -1)

    def score_terms(self, attention: Any, scale: float, context: Call) -> SelfAttentionTerms:
        distances = distances_of_block(context, slice(None), context.key_index.shape[0])
        return BiasByDistance(scale, (self.by_distance(distances),), context)


def _inverse_softplus(value: float) -> float:
    """x with log(1 + exp(x)) = value > 0."""
    return value + math.log(-math.expm1(-value))


@register("position", "gaussian_transformer", aliases=("gaussian_bias",))
class GaussianTransformerSpec(PositionSpec):
    """Guo, Zhang and Liu 2019, the Gaussian prior. It is the same to both sides: an encoder learns the order of tokens
    from a further position (`combined`).

    Args:
        start_scale: w at the start (`None`: 1 / `max_position_embeddings`, so that a token at a distance of its root
            loses 1).
        offset: whether there is a b.
        start_offset: b at the start (`None`: -w / 2, where no token is preferred to the token itself).
        per_head: numbers of its own for each head, or one pair for all heads of a layer.
    """

    summary = "scores fall with the square of the distance, at a learned rate"
    acts = frozenset({"score_terms"})

    start_scale: float | int | None = bounded(None, above=0)
    offset: bool = True
    start_offset: float | int | None = None
    per_head: bool = True

    def first_scale(self, config) -> float:
        return 1 / config.max_position_embeddings if self.start_scale is None else float(self.start_scale)

    def first_offset(self, config) -> float:
        return -self.first_scale(config) / 2 if self.start_offset is None else float(self.start_offset)

    def check_fields(self) -> None:
        if self.start_offset is not None and self.start_offset >= 0:
            raise ValueError(
                f"gaussian_transformer needs `start_offset` < 0, got {self.start_offset}; for no offset at all set"
                " `offset=False`."
            )
        if self.start_offset is not None and not self.offset:
            raise ValueError(
                f"gaussian_transformer has no offset with `offset=False`, but got `start_offset={self.start_offset}`;"
                " leave one of them out."
            )

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> GaussianTerms:
        return GaussianTerms(config, self)
