# SPDX-License-Identifier: Apache-2.0
"""TUPE: positions that attend to positions, untied from words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import register
from ..core.prepared import State
from ..core.reading_weights import weight_of
from .base import Position, PositionSpec, PositionTables, PositionTerms, key_positions
from .distances import distances_of_block
from .score_terms import SelfAttentionTerms
from .t5_relative_bias import relative_buckets


class TupeProducts(State):
    """p U^Q and p U^K of all positions, [rows, H, d]."""

    queries: Tensor
    keys: Tensor


class TupePosition(Position):
    """What all layers share: the table P, its norm, U^Q, U^K and the bias by distance."""

    def __init__(self, config, spec: TupeSpec):
        super().__init__()
        self.heads_count = config.num_attention_heads
        self.resets = spec.resets(config)
        width, heads = config.hidden_size, config.num_attention_heads * config.head_width
        self.table = nn.Embedding(config.max_position_embeddings + int(self.resets), width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.query_proj, self.key_proj = nn.Linear(width, heads), nn.Linear(width, heads)
        buckets = spec.num_buckets + int(self.resets)
        self.bias = nn.Embedding(buckets, config.num_attention_heads) if spec.relative else None

    def shared_tables(self) -> TupePosition:
        return self

    def projected(self) -> tuple[Tensor, Tensor]:
        """p U^Q and p U^K, [rows, H, d] each."""
        vectors = self.norm(weight_of(self.table))
        size = (self.heads_count, -1)
        return self.query_proj(vectors).unflatten(-1, size), self.key_proj(vectors).unflatten(-1, size)


class TupeTerms(PositionTerms):
    """score_ij = q_i k_j / sqrt(2 d) + (p_i U^Q)(p_j U^K) / sqrt(2 d) + b_{j-i} (eqs. 7 and 9).

    Where position 0 is [CLS], what it pays to others and what they pay to it does not depend on their places (section
    3.2): row 0 of the position terms is one number per head, and so is the rest of column 0. The first rows of P have
    no other use than to make these numbers (released code).
    """

    content_scale = 2**-0.5

    def __init__(self, config, spec: TupeSpec):
        super().__init__()
        self.spec, self.bidirectional, self.resets = spec, not config.is_decoder, spec.resets(config)

    def prepare(self, context: Call) -> None:
        if context.state(TupeProducts) is None:
            context.start(TupeProducts(*context.prepared(PositionTables).module.projected()))

    def score_terms(self, attention: Any, scale: float, context: Call) -> TupeScores:
        products = context.given(TupeProducts)
        queries, keys = products.queries * scale, products.keys
        bias, made = context.prepared(PositionTables).module.bias, []
        if self.resets:
            numbers = (queries[:2] * keys[:2]).sum(-1)
            if bias is not None:  # a bucket that no distance falls into, and one more
                first, last = self.spec.num_buckets // 2, self.spec.num_buckets
                numbers = numbers + weight_of(bias)[first : last + 1 : last - first]
            queries, keys = queries[1:], keys[1:]
            made.append(numbers.t())
        if bias is not None:
            buckets = relative_buckets(
                distances_of_block(context, slice(None), context.key_index.shape[0]),
                bidirectional=self.bidirectional,
                num_buckets=self.spec.num_buckets,
                max_distance=self.spec.max_distance,
            )
            made.append(bias(buckets).t())
        tables = (queries.transpose(0, 1), keys.transpose(0, 1), *made)
        return TupeScores(scale, tables, context, resets=self.resets, relative=self.spec.relative)


class TupeScores(SelfAttentionTerms):
    """The terms of one call. Tables: scaled p U^Q and p U^K by position [H, rows, d]; where [CLS] `resets`, its
    numbers to others and those of others to it [H, 2]; where `relative`, the bias by distance from the last query to
    the first key, and on, [H, T + S - 1]."""

    separable = True

    def __init__(
        self, scale: float, tables: tuple[Tensor, ...], context: Call, *, resets: bool, relative: bool
    ) -> None:
        super().__init__(scale, tables, context)
        self.resets, self.relative = resets, relative

    def line(self, tables: tuple[Tensor, ...]) -> Tensor | None:
        return tables[-1] if self.relative else None

    def by_query(self, query: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """p U^Q of the tokens. Where [CLS] is apart its row is zero, and two columns meet those of the keys: the first
        brings others what they pay to [CLS] less the bias that the pair gets as well, the second says that this is
        [CLS]."""
        placed = tables[0][:, self.context.positions].transpose(0, 1).to(query.dtype)
        if not self.resets:
            return (placed,)
        cls, cls_slot, slots = self._cls(self.context.positions)
        from_others = self._less_bias(1, tables, cls_slot - slots).masked_fill(cls, 0.0)
        is_cls = cls.to(placed.dtype).expand(from_others.shape)
        return (torch.cat((placed.masked_fill(cls, 0.0), from_others.to(placed.dtype), is_cls), dim=-1),)

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """p U^K of the tokens; the two columns say that this is [CLS], and bring what [CLS] pays to a key less the
        bias."""
        # A cache may have more slots than there are places.
        positions = key_positions(self.context).clamp(max=tables[1].shape[1] - 1)
        placed = tables[1][:, positions].transpose(0, 1).to(key.dtype)
        if not self.resets:
            return (placed,)
        cls, cls_slot, slots = self._cls(positions)
        to_others = self._less_bias(0, tables, slots - cls_slot)
        is_cls = cls.to(placed.dtype).expand(to_others.shape)
        return (torch.cat((placed.masked_fill(cls, 0.0), is_cls, to_others.to(placed.dtype)), dim=-1),)

    @staticmethod
    def _cls(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether a token is [CLS] [B or 1, 1, T, 1], the slot of its own text's [CLS] [B or 1, T], its slot [T]."""
        cls, slots = positions == 0, torch.arange(positions.shape[-1], device=positions.device)
        return cls[:, None, :, None], torch.where(cls, slots, 0).cummax(-1).values, slots

    def _less_bias(self, which: int, tables: tuple[Tensor, ...], distance: Tensor) -> Tensor:
        """[CLS]'s number less the bias at distance (key - query) [B or 1, T] -> [B or 1, h, T, 1]"""
        number = tables[2][None, :, which, None, None]
        if not self.relative:
            return number.expand(distance.shape[0], -1, distance.shape[-1], -1)
        zero = tables[-1].shape[-1] // 2  # an encoder's keys are its queries
        return number - tables[-1][:, distance + zero].transpose(0, 1).unsqueeze(-1)


@register("position", "tupe")
class TupeSpec(PositionSpec):
    """Ke, He and Liu 2021 (arXiv 2006.15595).

    Args:
        relative: also a bias by bucketed distance (TUPE-R; off: TUPE-A).
        untie_cls: position 0 is [CLS] and is treated apart (`None`: in an encoder that is the whole model; not where
            texts have no such token, in decoders and encoder-decoders).
        num_buckets, max_distance: of the bias, as T5's.
    """

    summary = "positions attend to positions with projections of their own, apart from words"
    acts = frozenset({"score_terms"})
    shares_tables = True

    relative: bool = True
    untie_cls: bool | None = None
    num_buckets: int = 32
    max_distance: int = 128

    def resets(self, config) -> bool:
        """Whether position 0 is treated apart."""
        if self.untie_cls is None:
            return not config.is_decoder and not config.is_encoder_decoder
        return self.untie_cls

    def check_fields(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(f"tupe needs an even `num_buckets` >= 4, got {self.num_buckets}.")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"tupe needs `max_distance` above half of `num_buckets` ({self.num_buckets // 2}), got"
                f" {self.max_distance}."
            )

    def check(self, config) -> None:
        if self.untie_cls and config.is_decoder:
            raise ValueError(
                "tupe with `untie_cls=True` treats position 0 as [CLS], which a decoder has not; leave `untie_cls` at"
                " None."
            )

    def shared_sizes(self, config) -> tuple:
        return (config.num_attention_heads, config.head_width)

    def max_length(self, config) -> int:
        return config.max_position_embeddings

    def build(self, config, **where) -> TupePosition:
        return TupePosition(config, self)

    def build_terms(self, config, layer_idx: int) -> TupeTerms:
        return TupeTerms(config, self)
