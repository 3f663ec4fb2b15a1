"""TUPE: positions that attend to positions, untied from words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..components import register
from ..context import LayerContext
from ..ops.shifted_rows import shift_rows
from .base import LayerTerms, Position, PositionSpec, key_positions
from .t5_relative_bias import relative_buckets

QUERIES, KEYS = "tupe_queries", "tupe_keys"  # streams: p U^Q and p U^K of all positions, [rows, H, d]


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

    def score_bias(self) -> TupePosition:
        return self

    def projected(self) -> tuple[Tensor, Tensor]:
        """p U^Q and p U^K, [rows, H, d] each."""
        vectors = self.norm(self.table.weight)
        size = (self.heads_count, -1)
        return self.query_proj(vectors).unflatten(-1, size), self.key_proj(vectors).unflatten(-1, size)


class TupeTerms(LayerTerms):
    """score_ij = q_i k_j / sqrt(2 d) + (p_i U^Q)(p_j U^K) / sqrt(2 d) + b_{j-i} (eqs. 7 and 9).

    Where position 0 is [CLS], what it pays to others and what they pay to it does not depend on their places (section
    3.2): row 0 of the position terms is one number per head, and so is the rest of column 0. The first rows of P have no
    other use than to make these numbers (released code).
    """

    content_scale = 2**-0.5

    def __init__(self, config, spec: TupeSpec):
        super().__init__()
        self.spec, self.bidirectional, self.resets = spec, not config.is_decoder, spec.resets(config)

    def prepare(self, context: LayerContext) -> None:
        if QUERIES not in context.streams:
            context.streams[QUERIES], context.streams[KEYS] = context.shared["score_bias"].projected()

    def tables(self, attention: Any, scale: float, context: LayerContext) -> tuple[Tensor, ...]:
        """Scaled p U^Q and p U^K by position [rows, H, d]; the numbers of [CLS] to others and of others to [CLS], [H]."""
        queries, keys = context.streams[QUERIES] * scale, context.streams[KEYS]
        if not self.resets:
            return queries, keys
        cls_to_others, others_to_cls = (queries[:2] * keys[:2]).sum(-1).unbind(0)
        return queries[1:], keys[1:], cls_to_others, others_to_cls

    def by_key(self, key: Tensor, tables: tuple[Tensor, ...], context: LayerContext) -> tuple[Tensor, ...]:
        places = key_positions(context).clamp(
            max=tables[1].shape[0] - 1
        )  # a cache may have more slots than there are places
        return (tables[1][places].transpose(1, 2),)

    def scores(self, query, key, tables, by_key, rows: slice, context: LayerContext) -> Tensor:
        positions = context.positions[:, rows]
        placed = tables[0][positions].transpose(1, 2)  # [B or 1, H, t, d]
        scores = torch.matmul(placed, by_key[0].transpose(-1, -2))
        bias = context.shared["score_bias"].bias
        keys = key.shape[2]
        if bias is not None:
            scores = scores + self._bias(bias, rows, keys, context)
        if self.resets:
            cls_to_others, others_to_cls = tables[2:]
            if bias is not None:  # a bucket that no distance falls into, and one more
                cls_to_others = cls_to_others + bias.weight[self.spec.num_buckets // 2]
                others_to_cls = others_to_cls + bias.weight[self.spec.num_buckets]
            first_key = key_positions(context)[:, None, None, :keys] == 0
            first_query = positions[:, None, :, None] == 0
            scores = torch.where(first_key, others_to_cls[:, None, None], scores)
            scores = torch.where(first_query, cls_to_others[:, None, None], scores)
        return scores

    def _bias(self, bias: nn.Embedding, rows: slice, keys: int, context: LayerContext) -> Tensor:
        """b_{j-i} of slots that follow each other, [H, t, s]: one number for each distance, laid out along the diagonals."""
        queries = context.query_index[rows]
        length = queries.shape[0]
        first = context.key_index[:1] - queries[-1:]  # from the last query to the first key
        buckets = relative_buckets(
            first + torch.arange(length + keys - 1, device=queries.device),
            bidirectional=self.bidirectional,
            num_buckets=self.spec.num_buckets,
            max_distance=self.spec.max_distance,
        )
        return shift_rows(bias(buckets).t()[:, None].expand(-1, length, -1), keys)


@register("position", "tupe")
class TupeSpec(PositionSpec):
    """Ke, He and Liu 2021 (arXiv 2006.15595).

    relative: also a bias by bucketed distance (TUPE-R; off: TUPE-A). untie_cls: position 0 is [CLS] and is treated apart
    (`None`: in an encoder that is the whole model; not where texts have no such token, in decoders and encoder-decoders).
    num_buckets, max_distance: of the bias, as T5's.
    """

    summary = "positions attend to positions with projections of their own, apart from words"
    acts = frozenset({"score_terms"})
    extrapolates = False

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
                f"tupe needs `max_distance` above half of `num_buckets` ({self.num_buckets // 2}), got {self.max_distance}."
            )

    def check(self, config) -> None:
        if self.untie_cls and config.is_decoder:
            raise ValueError(
                "tupe with `untie_cls=True` treats position 0 as [CLS], which a decoder has not; leave `untie_cls` at None."
            )

    def max_length(self, config) -> int:
        return config.max_position_embeddings

    def build(self, config, **where) -> TupePosition:
        return TupePosition(config, self)

    def build_terms(self, config, layer_idx: int) -> TupeTerms:
        return TupeTerms(config, self)
