# SPDX-License-Identifier: Apache-2.0
"""InDIGO: tokens in the order of their generation, which know of each other who stands left and who right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.reading_weights import weight_of
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTerms
from .distances import slot_distances, spread_queries
from .score_terms import SelfAttentionTerms

PLACES = "insertion_positions"


def relations(places: Tensor) -> Tensor:
    """places [..., T]: where each token, in the order of generation, stands in the finished text -> r [..., T, T] in
    {-1, 0, 1}, r_ij = sign(z_i - z_j): 1 where token j stands left of token i. A relation never changes once both
    stand."""
    return torch.sign(places.unsqueeze(-1) - places.unsqueeze(-2))


def insert(relation: Tensor, beside: int, right: bool) -> Tensor:
    """The relations [t + 1, t + 1] after a token was inserted directly right or left of token `beside`, from those
    before, [t, t] (section 3.1): to all others it stands as its neighbor does."""
    row = relation[beside].clone()
    row[beside] = 1 if right else -1
    top = torch.cat((relation, -row[:, None]), dim=1)
    return torch.cat((top, torch.cat((row, row.new_zeros(1)))[None]))


def places_of(relation: Tensor) -> Tensor:
    """Places [T] in the finished text: how many tokens stand left of each."""
    return (relation == 1).sum(-1)


class IndigoTerms(PositionTerms):
    """score_ij += q_i a_r, r = r_ij + 1, one table [3, d] for all heads of a layer (section 3.1)."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, config.head_width))

    def initialize(self, config, init) -> None:
        init.normal_(self.table, mean=0.0, std=config.initializer_range)

    def prepare(self, context: Call) -> None:
        """Raises `ValueError` where places are missing."""
        places = context.inputs.get(PLACES)
        if places is not None and places.shape[-1] < context.key_index.shape[0] and not context.static:
            raise ValueError(
                f"`{PLACES}` covers {places.shape[-1]} tokens, but cached and new tokens make "
                f"{context.key_index.shape[0]}; give the places of all of them."
            )

    def score_terms(self, attention: Any, scale: float, context: Call) -> IndigoScores:
        return IndigoScores(scale, (weight_of(self, "table")[None],), context)


class IndigoScores(SelfAttentionTerms):
    """The terms of one call, of the table a."""

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        products = torch.matmul(block.query, tables[0][0].t().to(block.query.dtype))
        context = self.context
        places = context.inputs.get(PLACES)
        if places is None:  # left to right: a slot is a place
            return spread_queries(
                products, lambda distance: 1 - torch.sign(distance), 1, block.rows, block.keys, context
            )
        sign = torch.sign(
            places[:, context.query_index[block.rows], None] - places[:, None, context.key_index[: block.keys]]
        )
        return _by_sign(products, sign[:, None])

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        products = torch.matmul(pairs.query, tables[0][0].t().to(pairs.query.dtype))
        places = self.context.inputs.get(PLACES)
        if places is None:
            return _by_sign(products, -torch.sign(slot_distances(pairs, self.context)))
        asks = _places_at(places, self.context.query_index[pairs.query_at])
        answers = _places_at(places, self.context.key_index[pairs.key_at])
        return _by_sign(products, torch.sign(asks.unsqueeze(-1) - answers.unsqueeze(-2)))


def _by_sign(products: Tensor, sign: Tensor) -> Tensor:
    """products [..., t, 3] of queries with the rows for left, same and right, sign [..., t, s] -> [..., t, s]"""
    left, same, right = products.unsqueeze(-2).unbind(-1)
    return torch.where(sign > 0, right, torch.where(sign < 0, left, same))


def _places_at(places: Tensor, slots: Tensor) -> Tensor:
    """places [B, T], slots [B or 1, h or 1, n, t] -> [B, h or 1, n, t]"""
    slots = slots.expand(places.shape[0], -1, -1, -1)
    return places.gather(1, slots.flatten(1)).view(slots.shape)


@register("position", "indigo")
class IndigoSpec(PositionSpec):
    """Gu, Liu and Cho 2019 (arXiv 1902.01370), section 3.1. Tokens come in the order of their generation; the input
    `insertion_positions` [B, T] (with a cache: of cached and new tokens) says where each stands in the finished text,
    and only the signs of differences matter. Without it, the order is left to right."""

    summary = "a key stands left or right of the query in the finished text; no more is known"
    acts = frozenset({"score_terms"})
    needs_causal = True
    gives = frozenset({HandOver.INSERTION_ORDER})
    inputs = (PLACES,)

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> IndigoTerms:
        return IndigoTerms(config)
