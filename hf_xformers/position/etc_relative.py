# SPDX-License-Identifier: Apache-2.0
"""ETC's relative positions: labels of pairs, with vectors of their own for long and for global tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import Prepared
from ..core.reading_weights import weight_of
from ..ops.score_terms.terms import Pairs, QueryBlock
from .base import Position, PositionSpec, PositionTerms
from .distances import pick
from .score_terms import SelfAttentionTerms


class TwoStreams(Prepared):
    """Which tokens of a call are global, where each stands among those of its stream, and which global token stands
    for it, [B or 1, T] each."""

    is_global: Tensor
    place: Tensor
    summary: Tensor


class EtcTerms(PositionTerms):
    """score_ij += (q_i E[l_ij] + beta[l_ij]) / sqrt(d) (Ainslie et al. 2020, arXiv 2004.08483, section 2.2).

    Labels l_ij of pairs in one stream are clipped distances: 0, 1 .. k to the right, k + 1 .. 2k to the left. Of a
    token and a global token they say whether the one stands for the other: 2k + 2, else 2k + 1. E [H, R, d] and beta
    [H, R] are those of the query's stream. With hard masks, a pair of label 2k + 1 is hidden.
    """

    def __init__(self, config, spec: EtcRelativeSpec):
        super().__init__()
        self.spec = spec
        heads, rows = config.num_attention_heads, spec.relative_vocab_size
        size = (heads, rows, config.head_width)
        self.long_table, self.global_table = (nn.Parameter(torch.empty(size)) for _ in range(2))
        self.long_bias, self.global_bias = (nn.Parameter(torch.empty(heads, rows)) for _ in range(2))

    def initialize(self, config, init) -> None:
        for table in (self.long_table, self.global_table):
            init.trunc_normal_(table, mean=0.0, std=0.5, a=-1.0, b=1.0)
        for bias in (self.long_bias, self.global_bias):
            init.zeros_(bias)

    def score_terms(self, attention: Any, scale: float, context: Call) -> EtcScores:
        vectors = torch.cat([weight_of(self, "long_table"), weight_of(self, "global_table")], dim=1)
        numbers = torch.cat([weight_of(self, "long_bias"), weight_of(self, "global_bias")], dim=1) * scale
        return EtcScores(scale, (vectors, numbers), context, self.spec)


class EtcScores(SelfAttentionTerms):
    """The terms of one call. Tables: both streams' E [H, 2R, d] and scaled beta [H, 2R]."""

    def __init__(self, scale: float, tables: tuple[Tensor, ...], context: Call, spec: EtcRelativeSpec) -> None:
        super().__init__(scale, tables, context)
        self.spec = spec
        index = context.key_index[None]
        alone = TwoStreams(torch.zeros_like(index, dtype=torch.bool), index, torch.zeros_like(index))
        self.streams: TwoStreams = context.find(TwoStreams) or alone  # a layer by itself reads one stream

    def labels(self, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        """Rows of the tables [B or 1, h or 1, n, t, s], and which pairs are hidden, if any are."""
        streams, spec = self.streams, self.spec
        rows = pairs.query.shape[0] if streams.place.shape[0] > 1 else 1

        def of(numbers: Tensor, at: Tensor) -> Tensor:
            at = at.clamp(min=0).expand(max(rows, at.shape[0]), -1, -1, -1)
            numbers = numbers.expand(at.shape[0], -1)
            return numbers.gather(1, at.flatten(1)).view(at.shape)

        q, k = ([of(x, at) for x in (streams.is_global, streams.place, streams.summary)] for at in pairs[-2:])
        (q_global, q_place, q_summary), (k_global, k_place, k_summary) = (
            [x.unsqueeze(-1) for x in q],
            [x.unsqueeze(-2) for x in k],
        )
        most, distance = spec.max_distance, k_place - q_place
        near = torch.where(distance >= 0, distance.clamp(max=most), most + (-distance).clamp(max=most))
        apart, crossing = q_summary != k_summary, q_global != k_global
        label = torch.where(crossing, torch.where(apart, 2 * most + 1, 2 * most + 2), near)
        hidden = None
        for hard, of_globals in ((spec.hard_g2l, True), (spec.hard_l2g, False)):
            if hard:
                some = crossing & apart & (q_global == of_globals)
                hidden = some if hidden is None else hidden | some
        return label + spec.relative_vocab_size * q_global.long(), hidden

    def pairs(self, pairs: Pairs, tables: tuple[Tensor, ...]) -> Tensor:
        labels, hidden = self.labels(pairs)
        # R products for each query, of which each pair takes one: no vector of a pair is made.
        products = torch.matmul(pairs.query, tables[0].to(pairs.query.dtype)[:, None].mT)
        found = pick(products + tables[1].to(products.dtype)[:, None, None], labels)
        if hidden is None:
            return found
        # Not -inf: in some rounds of tiles a query may have no other key.
        return found.masked_fill(hidden, torch.finfo(found.dtype).min / 4)

    def scores(self, block: QueryBlock, tables: tuple[Tensor, ...]) -> Tensor:
        return self.pairs(Pairs.of_block(block.query, block.query[:, :, :0], block.rows, block.keys), tables).squeeze(
            2
        )


@register("position", "etc_relative")
class EtcRelativeSpec(PositionSpec):
    """
    Args:
        max_distance: k, tokens to either side that are told apart.
        relative_vocab_size: R, labels that there are vectors for, at least 2 k + 4.
        hard_g2l, hard_l2g: a global token reads only the tokens that it stands for; a token reads only the global
            token that stands for it.
    """

    summary = "learned vectors by label of a pair: clipped distance, or whether a global token stands for a token"
    acts = frozenset({"score_terms"})
    reads = frozenset({HandOver.SUMMARIES})

    max_distance: int = 12
    relative_vocab_size: int = 32
    hard_g2l: bool = False
    hard_l2g: bool = False

    def check_fields(self) -> None:
        if self.max_distance < 0 or self.relative_vocab_size < 2 * self.max_distance + 4:
            raise ValueError(
                f"etc_relative needs `max_distance` >= 0 and `relative_vocab_size` >= 2 * max_distance + 4, got"
                f" {self.max_distance} and {self.relative_vocab_size}."
            )

    def build(self, config, **where) -> Position:
        return Position()

    def build_terms(self, config, layer_idx: int) -> EtcTerms:
        return EtcTerms(config, self)
